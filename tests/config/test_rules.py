"""Each rule of the table: what breaks it, what it says, and that every way out it names is accepted."""

from __future__ import annotations

import functools
import shlex
from importlib import util

import pytest

from tests.config.rule_cases import BYTES, CASES, ON_A_GPU, SCHEDULE
from titanyaml import machine
from titanyaml.config.rules import data, table
from titanyaml.config.rules.view import Unknown, View

RULES = {rule.name: rule for rule in table.RULES}


@pytest.mark.parametrize("override", ["checkpoint.resume=", "run.dir=' '", "run.dir=/"])
def test_an_empty_path_is_not_the_current_folder(report, override: str) -> None:
    (problem,) = report(*BYTES, override).problems
    assert problem.key == override.partition("=")[0]


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(RULES)
    assert len(RULES) == len(table.RULES), "two rules of one name"


@pytest.fixture
def ask(compose, monkeypatch):
    """The problem of one rule under overrides; this machine has no GPU and, for *_is_installed, no optional package."""
    monkeypatch.setattr(machine, "gpus", lambda: [])

    def asked(name: str, overrides: list[str], *, everything: bool = False):
        """everything: the keys of all that is wrong, by the schema or by any rule."""
        with monkeypatch.context() as patch:
            if name.endswith("_is_installed"):
                patch.setattr(data, "find_spec", lambda package: None)
            if name in ON_A_GPU:
                patch.setattr(machine, "gpus", lambda: ["H200"])
            tree = inspected(tuple(overrides))
            if everything:
                return {problem.key for problem in tree.problems + table.check_rules(tree.values)}
            return RULES[name].check(View(tree.values))

    inspected = functools.cache(lambda overrides: table.check_tree(compose(*overrides)))
    return asked


@pytest.mark.parametrize("name", CASES)
def test_rule(ask, name: str) -> None:
    overrides, text = CASES[name]
    base = [] if any(override.startswith(("tokenizer", "tracker", "data")) for override in overrides) else BYTES
    problem = ask(name, base + overrides)
    assert problem is not None
    assert text in problem.message
    assert any(
        problem.key == key or problem.key.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{problem.key}.")
        for key in RULES[name].keys
    ), "a rule speaks of a key that it reads"
    fixes = [fix for fix in problem.hint.split(" or ") if fix and "<" not in fix]
    wrong = ask(name, base + overrides, everything=True)
    for fix in fixes:
        if not fix.startswith("pip install"):
            assert ask(name, base + overrides + shlex.split(fix)) is None, fix
            assert ask(name, base + overrides + shlex.split(fix), everything=True) <= wrong, f"{fix} is refused"
    assert fixes or name in ("runner_checkpoint_exists", "optim_group_patterns_are_valid")


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["quant=float8_rowwise", "quant.emulate=true", "quant.fast_accum=true"], "quant.fast_accum=null"),
        (["quant.fsdp_float8_all_gather=true"], "quant.fsdp_float8_all_gather=false"),
    ],
)
def test_a_value_that_a_rule_refuses_is_not_to_be_read(report, overrides: list[str], hint: str) -> None:
    """The schema offers what would make a key read; not where a rule refuses the key's value then."""
    unread, refused = report(*BYTES, *overrides).problems
    assert unread.key == refused.key and "nothing reads it" in unread.message
    assert unread.hint == hint and hint in refused.hint.split(" or ")
    assert report(*BYTES, *overrides, hint).problems == []


def test_a_check_of_split_masters_is_of_the_device_that_runs(ask, monkeypatch) -> None:
    name, split = "split_master_needs_bfloat16_weights", [*BYTES, "optim.master=split", "parallel=fsdp2"]
    for runner in ("train", "check"):
        assert "auto, which is float32 without a GPU" in ask(name, [*split, f"runner={runner}"]).message
    problem = ask(name, [*split, "runner=check"])
    assert problem.hint == "optim.master=float32 or train.compute_dtype=bfloat16 or hardware=h200"
    for fix in problem.hint.split(" or "):
        assert ask(name, [*split, "runner=check", fix], everything=True) == set()
    assert ask(name, [*split, "runner=plan", "hardware=h200"]) is None
    assert ask(name, [*split, "hardware=h200"]) is not None, "a training runs here, whatever is described"
    monkeypatch.setattr(machine, "gpus", lambda: ["H200"])
    assert ask(name, [*split, "runner=check"]) is None


def test_the_shipped_default_keeps_every_rule(compose) -> None:
    view = View(table.check_tree(compose()).values)
    assert [rule.name for rule in table.RULES if rule.check(view) is not None] == []


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["model.num_heads=12", "model.num_kv_heads=5"], "model.num_kv_heads=4 or model.num_kv_heads=6"),
        (["model.num_heads=8", "model.num_kv_heads=16"], "model.num_kv_heads=8"),
    ],
)
def test_nearest_kv_heads_on_both_sides(ask, overrides: list[str], hint: str) -> None:
    assert ask("kv_heads_divide_heads", overrides).hint == hint


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["train.global_batch=7", "train.local_batch=2"], "train.global_batch=6 or train.global_batch=8"),
        (["train.global_batch=3", "train.local_batch=2", "parallel=fsdp2"], "train.global_batch=4"),
        # dp_shard derived
        (
            ["train.global_batch=9", "train.local_batch=1", "launch.nproc=4"],
            "train.global_batch=8 or train.global_batch=12",
        ),
    ],
)
def test_nearest_batches(ask, overrides: list[str], hint: str) -> None:
    assert ask("data_ranks_divide_global_batch", overrides).hint == hint


def test_derived_degree_takes_only_multiples(ask) -> None:
    overrides = ["parallel=auto", "parallel.dp_replicate=4", "launch.nproc=6"]
    problem = ask("mesh_fits_ranks", overrides)
    assert problem.key == "parallel.dp_shard"
    assert problem.hint == "launch.nproc=4 or launch.nproc=8"
    for fix in problem.hint.split(" or "):
        assert ask("mesh_fits_ranks", [*overrides, fix]) is None


def test_tensor_parallel_peers_share_no_data(ask) -> None:
    off = "++pipeline.plugins.fsdp._target_=null"
    assert ask("data_ranks_need_fsdp_plugin", ["parallel=tp2", off]) is None
    assert "2 ranks share the data" in ask("data_ranks_need_fsdp_plugin", ["parallel=fsdp2_tp2", off]).message


def test_the_whole_sequence_on_every_rank_need_not_divide(ask) -> None:
    overrides = ["parallel=tp4", "train.seq_len=510"]
    hint = "parallel.tp=2 or train.seq_len=508 or train.seq_len=512 or parallel.tp_sequence_parallel=false"
    assert ask("tp_divides_seq_len", overrides).hint == hint


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("fsdp_prefetch_has_blocks", ["parallel=tp2", "parallel.fsdp_prefetch=1"], "one rank gathers no weights"),
        (
            "fsdp_prefetch_has_blocks",
            ["parallel=fsdp2_pp2", "parallel.fsdp_prefetch=1"],
            "is 1, but a pipeline gathers",
        ),
        ("cpu_offload_needs_gpu_and_fsdp", ["parallel=tp2", "parallel.fsdp_cpu_offload=true"], "data rank has no FSDP"),
        (
            "reuse_memory_needs_gpu_and_fsdp",
            ["parallel=tp2", "parallel.fsdp_reuse_memory=true"],
            "data rank has no FSDP",
        ),
        (
            "async_tp_ops_are_usable",
            ["parallel=tp2", "compile=block", "compile.async_tp=true", "compile.async_tp_ops=[auto,all_gather]"],
            "has auto beside others",
        ),
    ],
)
def test_further_reasons_of_a_rule(ask, name: str, overrides: list[str], text: str) -> None:
    problem = ask(name, overrides)
    assert text in problem.message
    for fix in problem.hint.split(" or "):
        assert ask(name, [*overrides, *shlex.split(fix)]) is None


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        # 6 heads, 3 key/value heads: the smallest degree that all sizes share
        (
            [
                "model.num_heads=6",
                "model.num_kv_heads=3",
                "model.dim=192",
                "model.ffn_dim=768",
                "model.vocab_size=4098",
                "train.seq_len=510",
            ],
            "parallel=tp3 or compile.async_tp=false",
        ),
        (["model.num_kv_heads=1"], "compile.async_tp=false"),
        (["launch.nproc=1"], "parallel=tp2 launch.nproc=null or compile.async_tp=false"),
    ],
)
def test_async_tp_offers_a_degree_that_divides_the_model(ask, overrides: list[str], hint: str) -> None:
    assert ask("async_tp_needs_tp", [*BYTES, "compile.async_tp=true", *overrides]).hint == hint


def test_async_tp_is_compiled_where_a_gpu_is_or_a_mode_is_given(ask, monkeypatch) -> None:
    overrides = ["compile.async_tp=true", "parallel=tp2"]
    assert ask("async_tp_needs_compile", [*overrides, "compile=none"]).message.startswith("is none; async tensor")
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1"])
    assert ask("async_tp_needs_compile", overrides) is None


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["optim=adamw_8bit"], "compile.optimizer"), (["optim.implementation=foreach"], "optim.implementation")],
)
def test_a_compiled_update_is_adamws_own(ask, overrides: list[str], key: str) -> None:
    problem = ask("compiled_optimizer_needs_torch_adamw", [*BYTES, "compile.optimizer=true", *overrides])
    assert problem.key == key
    for fix in problem.hint.split(" or "):
        more = shlex.split(fix)
        assert (
            ask("compiled_optimizer_needs_torch_adamw", [*BYTES, "compile.optimizer=true", *overrides, *more]) is None
        )


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["parallel=pp4", "parallel.pp_schedule=ZBVZeroBubble", "train.global_batch=16"], "train.global_batch=28"),
        (
            ["parallel=pp2", "parallel.pp_schedule=Interleaved1F1B", "train.global_batch=28"],
            "train.global_batch=24 or train.global_batch=32",
        ),
        (["parallel=single", "parallel.pp=-1", "launch.nproc=3", "train.global_batch=8"], "train.global_batch=12"),
    ],
)
def test_smallest_batch_that_fills_the_pipe(ask, overrides: list[str], hint: str) -> None:
    assert ask("microbatches_fill_pipeline", overrides).hint == hint


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "row 2 (rank 1): the backward 1B1 (or 1I1 and 1W1) is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1", "row 2 (rank 1), column 3: 1B1 comes before 1F1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "row 1 (rank 0), column 2: deadlock: 0B0 waits for 1B0"),
        ("0F0,0B0\n1F0,1C0", "row 2 (rank 1), column 2: '1C0' is no action"),
    ],
)
def test_a_broken_schedule_is_refused_before_a_rank_starts(report, tmp_path, rows: str, problem: str) -> None:
    (tmp_path / "broken.csv").write_text(rows)
    (reported,) = report(*BYTES, "parallel=pp2", f"parallel.pp_schedule_csv={tmp_path}/broken.csv").problems
    assert reported.key == "parallel.pp_schedule_csv"
    assert problem in reported.message


def test_a_schedule_brings_its_microbatches(compose) -> None:
    from titanyaml.config import dump
    from titanyaml.config.degrees import global_batch, resolve_degrees

    for overrides, expected in [([SCHEDULE], 8), (["parallel.pp_schedule=DualPipeV"], 16), ([], 8)]:
        config = dump.to_dataclass(compose(*BYTES, "parallel=pp2", "train.local_batch=4", *overrides))
        assert global_batch(config, resolve_degrees(config.parallel, world_size=2)) == expected


def test_a_mesh_without_nproc_brings_its_own_ranks(ask) -> None:
    assert ask("mesh_fits_ranks", ["parallel=hsdp2x4"]) is None


def test_torchrun_gives_the_ranks(ask, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    problem = ask("mesh_fits_ranks", ["launch=external", "parallel=fsdp2"])
    assert problem.message == "the mesh dp_shard(2) needs 2 ranks, but 3 are started"
    assert problem.hint == "parallel=auto"
    monkeypatch.delenv("WORLD_SIZE")
    assert ask("mesh_fits_ranks", ["launch=external", "parallel=fsdp2"]) is None


@pytest.mark.parametrize(
    ("compute", "param", "reduced", "legal"),
    [
        ("float64", "float64", "float64", True),
        ("auto", "float32", "float32", True),
        ("float32", "float32", "float32", True),
        ("bfloat16", "float32", "bfloat16", True),
        ("bfloat16", "float32", "float32", True),
        ("float64", "float32", "float32", False),
        ("float64", "float64", "float32", False),
        ("float32", "float32", "float64", False),
        ("auto", "float32", "bfloat16", False),
    ],
)
def test_dtype_combinations(ask, compute: str, param: str, reduced: str, legal: bool) -> None:
    overrides = [f"train.compute_dtype={compute}", f"train.param_dtype={param}", f"train.reduce_dtype={reduced}"]
    answers = [ask("float64_dtypes_go_together", overrides), ask("reduce_dtype_is_as_wide_as_compute_dtype", overrides)]
    assert (answers == [None, None]) is legal


def test_byte_vocabulary_is_the_tokenizers() -> None:
    from titanyaml.tokenizer import ByteTokenizer

    assert ByteTokenizer().vocab_size == data.BYTE_VOCABULARY


@pytest.mark.parametrize("row", data.PACKAGES, ids=lambda row: row[2])
def test_packages_are_installed_by_setup(row: tuple) -> None:
    assert util.find_spec(row[2]) is not None


def test_all_rules_are_asked_and_collected(compose) -> None:
    problems = table.check_rules(
        compose(*BYTES, "model.num_kv_heads=3", "train.seq_len=600", "schedule=wsd", "schedule.decay_steps=300")
    )
    assert [problem.key for problem in problems] == ["model.num_kv_heads", "train.seq_len", "schedule.warmup_steps"]


def test_a_rule_is_not_asked_about_a_key_that_is_wrong_itself(compose) -> None:
    values = table.check_tree(compose(*BYTES, "model.num_kv_heads=3")).values
    del values["model"]["num_heads"]
    with pytest.raises(Unknown):
        RULES["kv_heads_divide_heads"].check(View(values))
    assert table.check_rules(values) == []


def test_parameter_count_is_the_published_one(compose) -> None:
    from titanyaml.config.decoder_shape import DecoderShape

    assert DecoderShape.of(compose("model=llama3_8b").model).num_params == 8_030_261_248
    assert DecoderShape.of(compose("model=llama3_1b").model).num_params == 1_235_814_400


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["parallel=fsdp2_pp2"], "parallel.pp is above 1"),
        (["parallel=fsdp2", "parallel.fsdp_cpu_offload=true"], "gradients go to host memory"),
        (["parallel=fsdp2", "train.local_batch=2", "train.global_batch=8"], "takes several backward passes"),
    ],
)
def test_freed_memory_takes_whole_gradients_alone(ask, overrides, text) -> None:
    name, overrides = "reuse_memory_needs_whole_gradients", [*overrides, "parallel.fsdp_reuse_memory=true"]
    problem = ask(name, overrides)
    assert text in problem.message
    assert ask(name, [*overrides, problem.hint]) is None
    assert (
        ask(name, ["parallel=fsdp2", "train.local_batch=2", "train.global_batch=4", "parallel.fsdp_reuse_memory=true"])
        is None
    )


def test_an_empty_text_filters_nothing(ask) -> None:
    problem = ask("filter_fqns_name_modules", [*BYTES, "quant=float8_rowwise", "quant.filter_fqns=['',wq]"])
    assert problem.message == "has an empty text, which names no layer"
    assert problem.hint == "'quant.filter_fqns=[wq]'"
