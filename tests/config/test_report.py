"""One report of everything: what was typed, what the files hold, what Hydra would have said one at a time."""

from __future__ import annotations

import re
import shlex

import pytest
from omegaconf import OmegaConf

from titanyaml.config import schema
from titanyaml.errors import ConfigError

GLOBAL = "# @package _global_\n"


def test_a_right_configuration_is_typed(report) -> None:
    result = report("train.steps=1e2", "optim.lr=1", "tokenizer=bytes")
    assert result.problems == []
    assert result.cfg._metadata.object_type is schema.Config
    assert result.cfg.train.steps == 100 and type(result.cfg.train.steps) is int
    assert type(result.cfg.optim.lr) is float
    assert result.cfg.hydra.overrides.task == ["train.steps=1e2", "optim.lr=1", "tokenizer=bytes"]
    assert OmegaConf.is_struct(result.cfg)


def test_it_is_what_hydra_composes(report, compose) -> None:
    overrides = ["model=llama3_8b", "parallel=hsdp2x4", "ac=full", "optim.lr=1e-3", "+user.mine=3", "tokenizer=bytes"]
    result = report(*overrides)
    ours = OmegaConf.to_container(OmegaConf.masked_copy(result.cfg, [key for key in result.cfg if key != "hydra"]))
    assert ours == OmegaConf.to_container(compose(*overrides))


def test_three_mistakes_in_one_report(with_files) -> None:
    files = {"experiment/bad.yaml": f"{GLOBAL}train:\n  seqlen: 128\noptim:\n  lr: fast\n"}
    result = with_files(
        files, "experiment=bad", "modle=llama3_8b", "+optim.lrr=1", "model.num_kv_heads=3", "tokenizer=bytes"
    )
    text = re.sub(r"from: \S*/experiment", "from: MINE/experiment", str(ConfigError(result.problems)))
    assert (
        text
        == """\
5 configuration problems:
  1. modle: unknown key; did you mean model?
      try: model=llama3_8b
      from: override 'modle=llama3_8b'
  2. optim.lrr: unknown key; did you mean optim.lr?
      try: optim.lr=1
      from: override '+optim.lrr=1'
  3. optim.lr: is 'fast'
      allowed: a finite number > 0
      from: MINE/experiment/bad.yaml:5
  4. train.seqlen: unknown key; did you mean train.seq_len?
      try: train.seq_len=128
      from: MINE/experiment/bad.yaml:3
  5. model.num_kv_heads: is 3, which does not divide model.num_heads=8
      allowed: 1, 2, 4, 8
      try: model.num_kv_heads=2 or model.num_kv_heads=4
      from: override 'model.num_kv_heads=3'"""
    )


@pytest.mark.parametrize(
    ("override", "key", "message", "hint"),
    [
        # keys
        ("optim.lrr=1", "optim.lrr", "unknown key; did you mean optim.lr?", "optim.lr=1"),
        ("+optim.lrr=1", "optim.lrr", "unknown key; did you mean optim.lr?", "optim.lr=1"),
        ("++optim.lrr=1", "optim.lrr", "unknown key; did you mean optim.lr?", "optim.lr=1"),
        ("trian.steps=3", "trian.steps", "unknown key; did you mean train.steps?", "train.steps=3"),
        ("optim.lr.x=3", "optim.lr.x", "unknown key; did you mean optim.lr?", "optim.lr=3"),
        ("optim={lrr: 3}", "optim.lrr", "unknown key; did you mean optim.lr?", "optim.lr=3"),
        ("seed=3", "seed", "unknown key; did you mean run.seed?", "run.seed=3"),
        ("zzz=3", "zzz", "unknown key", ""),
        ("+train.steps=3", "train.steps", "'+train.steps=3': the key exists, + is for new ones", "train.steps=3"),
        ("~optim.lr", "optim.lr", "'~optim.lr': no key can be removed", "optim.lr=0.0003"),
        ("user.x=3", "user.x", "is not there yet; + adds it", "+user.x=3"),
        (
            "model.rope_scaling.factor=4",
            "model.rope_scaling.factor",
            "is not there yet; + adds it",
            "+model.rope_scaling.factor=4",
        ),
        (
            "pipeline.plugins.ac.mode=full",
            "pipeline.plugins.ac.mode",
            "the node is the group 'ac'; an override here would replace it",
            "ac.mode=full",
        ),
        (
            "++pipeline.plugins.ac.mode=full",
            "pipeline.plugins.ac.mode",
            "the node is the group 'ac'; an override here would replace it",
            "ac.mode=full",
        ),
        ("hydra.swep.dir=x", "hydra.swep.dir", "Could not override 'hydra.swep.dir'", ""),
        # groups
        ("modle=llama3_8b", "modle", "unknown key; did you mean model?", "model=llama3_8b"),
        ("model=llama3_8bb", "model", "there is no option 'llama3_8bb'", "model=llama3_8b"),
        ("parallel=FSDP32-TP8", "parallel", "there is no option 'FSDP32-TP8'", "parallel=fsdp32_tp8"),
        ("parallel=hsdp2x4cp2", "parallel", "there is no option 'hsdp2x4cp2'", "parallel=hsdp2x4_cp2"),
        ("parallel.context_parallel_size=2", "parallel.context_parallel_size", "unknown key; did", "parallel.cp=2"),
        ("train.device=cuda", "train.device", "unknown key", ""),
        ("parallel=fsdp2.5", "parallel", "there is no option 'fsdp2.5'", "parallel=fsdp2"),
        ("quant=FP8_Rowwise", "quant", "there is no option 'FP8_Rowwise'", "quant=float8_rowwise"),
        ("parallel=fsdp2_fsdp4", "parallel", "there is no option 'fsdp2_fsdp4'", "parallel=fsdp2_tp2"),
        ("experiment=lr_swep", "experiment", "there is no option 'lr_swep'", "experiment=lr_sweep"),
        ("plugin=[nois]", "plugin", "there is no option 'nois'", ""),
        ("ac=null", "ac", "null is no option", "ac=none"),
        ("ac=off", "ac", "there is no option 'off'", ""),
        ("ac=false", "ac", "false is no option", "ac=none"),
        ("model=[llama3_1b,llama3_8b]", "model", "[llama3_1b,llama3_8b]: one option at a time", "model=llama3_1b"),
        ("model=llama3_8b.yaml", "model", "'llama3_8b.yaml': options are named without an ending", "model=llama3_8b"),
        ("model=llama3_8b.yml", "model", "'llama3_8b.yml': options are named without an ending", "model=llama3_8b"),
        ("+model=llama3_8b", "model", "the group has an option already", "model=llama3_8b"),
        ("++model=llama3_8b", "model", "'++model=llama3_8b': ++ is for keys", "model=llama3_8b"),
        ("+experiment=lr_sweep", "experiment", "the group has an option already", "experiment=lr_sweep"),
        ("optim@mine=adamw", "optim", "Could not override 'optim@mine'", ""),
        # text
        ("train", "", "'train' is no override", "runner=train"),
        ("runner.prompt=def f(x):", "runner.prompt", "'def f(x):' cannot be read", "'runner.prompt=\"def f(x):\"'"),
        ("optim.lr=1e-3,1e-4", "optim.lr", "'1e-3,1e-4' stands for several values", "-m optim.lr=1e-3,1e-4"),
        ("run.name=a,b", "run.name", "'a,b' stands for several values", "-m run.name=a,b or 'run.name=\"a,b\"'"),
        ("optim.lr=range(1,3)", "optim.lr", "'range(1,3)' stands for several values", "-m optim.lr=range(1,3)"),
        ("hydra.searchpath=3", "hydra.searchpath", "hydra.searchpath must be a list", ""),
        # values
        ("train.steps=10k", "train.steps", "is '10k'", ""),
        ("train.steps=null", "train.steps", "is null", ""),
        ("run.name=a\\${x}", "run.name", "is 'a${x}'", ""),
    ],
)
def test_what_was_typed(report, override: str, key: str, message: str, hint: str) -> None:
    """Together with another mistake, which must still be told, and nothing else."""
    problem, second = report("tokenizer=bytes", override, "sweep.on_failure=x").problems
    assert (problem.key, problem.hint, problem.origin) == (key, hint, f"override {override!r}")
    assert problem.message.startswith(message)
    assert second.key == "sweep.on_failure"


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["ac.budget=0.5"], "ac.budget=0.8"),  # nothing is compiled here
        (["ac.budget=0.5", "compile=block"], "ac.budget=0.8 or ac.mode=memory_budget"),
        (["quant.product=own"], "quant.product=torchao"),  # no GPU
        (["quant.force_recompute_weight=false"], "quant.force_recompute_weight=true"),
        (["parallel.pp_schedule=GPipe"], "parallel.pp_schedule=1F1B or parallel.pp=2 parallel.dp_shard=1"),
        (["parallel.pp_stages_per_rank=2"], "parallel.pp_stages_per_rank=null"),  # 1F1B has one
        (
            ["parallel=ddp2", "launch.nproc=2", "parallel.pp_schedule=GPipe"],
            "parallel.pp_schedule=1F1B or parallel.pp=2 launch.nproc=null",
        ),
    ],
)
def test_what_would_read_a_key_is_offered_where_it_is_accepted(report, overrides: list[str], hint: str) -> None:
    (problem,) = report("tokenizer=bytes", *overrides).problems
    assert "but nothing reads it: " in problem.message and problem.hint == hint
    for fix in hint.split(" or "):
        assert report("tokenizer=bytes", *overrides, *shlex.split(fix)).problems == []


def test_quoted_text_of_the_hint_is_read(report) -> None:
    assert report('runner.prompt="def f(x):"', "runner=sample", "runner.checkpoint=.", "parallel=single").problems == []


@pytest.mark.parametrize(
    "override",
    [
        "+model.rope_scaling.factor=4",
        "+user.x=3",
        "optim={lr: 1e-2}",
        "plugin=[]",
        "~tracker",
        "optim.groups=[{pattern: a}]",
        "hydra.verbose=true",
        "model.rope_scaling=null",
        "++optim.lr=1",
    ],
)
def test_what_may_be_typed(report, override: str) -> None:
    assert report("tokenizer=bytes", override).problems == []


@pytest.mark.parametrize(
    ("name", "text", "key", "message", "hint"),
    [
        (
            "late header",
            f"# what it is\n{GLOBAL}optim: {{lr: 1}}\n",
            "experiment",
            "the file of the group 'experiment' put",
            "make '# @package _global_' the first line of the file",
        ),
        (
            "relative override",
            "defaults: [override model: llama3_8b]\n",
            "experiment",
            "In 'experiment/bad': Could not",
            "an experiment begins with the line '# @package _global_'",
        ),
        (
            "no override",
            f"{GLOBAL}defaults: [/model: llama3_8b]\n",
            "experiment",
            "Multiple values for model",
            "an experiment begins with the line '# @package _global_'",
        ),
        (
            "unknown option",
            f"{GLOBAL}defaults: [override /model: llama3_8bb]\n",
            "model",
            "there is no option 'llama3_8bb'",
            "override /model: llama3_8b",
        ),
        (
            "unknown group",
            f"{GLOBAL}defaults: [override /modle: llama3_8b]\n",
            "experiment",
            "In 'experiment/bad': Could not override 'modle'",
            "override /model: ...",
        ),
        (
            "YAML bool",
            f"{GLOBAL}defaults: [override /ac: off]\n",
            "experiment",
            "Unsupported item value in defaults : bool",
            "quotes around names",
        ),
        ("tab", f"{GLOBAL}optim:\n\tlr: 3\n", "experiment", "a file is no YAML", ""),
        ("duplicate key", f"{GLOBAL}optim:\n  lr: 3\n  lr: 4\n", "experiment", "a file is no YAML", ""),
        ("section as value", f"{GLOBAL}optim: 3\n", "optim", "is 3", ""),
        ("unknown section", f"{GLOBAL}trian:\n  steps: 3\n", "trian", "unknown key; did you mean train?", "train"),
        ("sexagesimal", f"{GLOBAL}launch:\n  step_timeout_s: 1:30x\n", "launch.step_timeout_s", "is '1:30x'", ""),
    ],
)
def test_what_a_file_holds(with_files, name: str, text: str, key: str, message: str, hint: str) -> None:
    problems = with_files({"experiment/bad.yaml": text}, "experiment=bad", "tokenizer=bytes", "optim.beta1=7").problems
    (problem,) = [problem for problem in problems if problem.key == key]
    assert problem.message.startswith(message) and problem.hint.startswith(hint), name
    assert "experiment" in problem.origin
    if key != "optim":
        assert "optim.beta1" in {other_problem.key for other_problem in problems}, "the rest is told, too"


def test_a_file_with_the_wrong_ending_is_named(with_files) -> None:
    (problem,) = with_files({"model/mine.yml": "dim: 8\n"}, "model=mine").problems
    assert problem.message.endswith("model/mine.yml is not found because of its ending")
    assert problem.hint == "rename it to mine.yaml"


def test_a_users_option_is_found(with_files) -> None:
    sizes = (
        "{name: mine, vocab_size: 300, dim: 8, num_layers: 1, num_heads: 2, num_kv_heads: 1, ffn_dim: 8, "
        "max_seq_len: 64}"
    )
    result = with_files({"model/mine.yaml": sizes}, "model=mine", "tokenizer=bytes")
    assert result.problems == [] and result.cfg.model.dim == 8


def test_a_refused_option_says_nothing_of_its_values(report) -> None:
    """The model is unknown: that its vocabulary is too small for the tokenizer would be a guess."""
    result = report("model=llama3_9b", "tokenizer.vocab_size=100000").problems
    assert [problem.key for problem in result] == ["model"]


def test_a_mesh_name_is_an_origin(report) -> None:
    (problem,) = report("parallel=ep2", "tokenizer=bytes").problems
    assert (problem.key, problem.origin) == ("parallel.ep", "override 'parallel=ep2'")


def test_the_common_part_of_a_sweep(report) -> None:
    """Swept keys, and what single jobs may heal, are left to the jobs."""
    result = report(
        "model=llama3_debug,llama3_8bb", "optim.lr=1,abc", "train.seq_len=99999", "optim.lrr=3", multirun=True
    )
    assert [problem.key for problem in result.problems] == ["optim.lrr"]


def test_keys_swept_by_an_experiment_are_checked(with_files) -> None:
    text = f"{GLOBAL}hydra: {{mode: MULTIRUN, sweeper: {{params: {{optim.lrr: '1,2'}}}}}}\n"
    (problem,) = with_files({"experiment/s.yaml": text}, "experiment=s", multirun=True).problems
    assert problem.message == "sweeps the unknown key optim.lrr" and problem.hint == "optim.lr"


def test_nothing_is_told_twice(report) -> None:
    assert len(report("optim.lrr=1", "optim.lrr=1", "tokenizer=bytes").problems) == 1


def test_a_value_of_an_own_option_is_found_in_its_file(with_files) -> None:
    result = with_files({"optim/own.yaml": "lr: fast\nbeta1: 0.5\n"}, "optim=own", "optim.beta1=2", "tokenizer=bytes")
    origin = {problem.key: problem.origin for problem in result.problems}
    assert origin["optim.lr"].endswith("optim/own.yaml:1")
    assert origin["optim.beta1"] == "override 'optim.beta1=2'"


def test_a_typed_key_is_named_also_where_the_option_comes_after_it(report) -> None:
    (problem,) = report("data.max_files=20", "data=synthetic", "tokenizer=bytes").problems
    assert (problem.key, problem.origin) == ("data.max_files", "override 'data.max_files=20'")


def test_a_group_file_that_repeats_its_group(with_files) -> None:
    (problem,) = with_files({"optim/own.yaml": "optim:\n  lr: 1\n"}, "optim=own", "tokenizer=bytes").problems
    assert problem.key == "optim.optim" and "take out the line 'optim:'" in problem.hint


def test_an_override_without_a_key(report) -> None:
    (problem,) = report("=5", "tokenizer=bytes").problems
    assert problem.message == "'=5' names no key"


def test_more_ranks_than_any_machine(report) -> None:
    (problem,) = report("parallel=ddp99999999999999999999", "tokenizer=bytes").problems
    assert (problem.key, problem.allowed) == ("parallel.dp_replicate", "an integer >= -1 and <= 1048576")


def test_an_integer_that_no_machine_counts_to(report) -> None:
    (problem,) = report("train.steps=1e30", "tokenizer=bytes").problems
    assert (problem.key, problem.allowed) == ("train.steps", "an integer >= 1, up to 2**53")
