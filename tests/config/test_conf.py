"""Every YAML file that is shipped: it composes, it is right, it says what it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from titanyaml.config import instantiate, schema, schema_keys

REPO = Path(__file__).parents[2]
CONF = REPO / "conf"
FILES = sorted(path for path in CONF.rglob("*.yaml") if path.parent.name != "local")
OPTIONS = [(path.parent.name, path.stem) for path in FILES if path.parent != CONF]
NAMES = ["=".join(option) for option in OPTIONS]
EXPERIMENTS = sorted(path.stem for path in (REPO / "experiments").glob("*.yaml"))

#: What an option needs beside itself.
COMPANIONS = {
    ("ac", "memory_budget"): ["compile=block"],
    ("ac", "auto"): ["ac.memory_gib=8"],
    ("profile", "memory"): ["profile.kind=trace"],  # needs a GPU
    ("profile", "both"): ["profile.kind=trace"],
    ("data", "files"): ["data.paths=[conf]"],
    ("data", "hf"): ["data.dataset=name"],
    ("tokenizer", "hf"): ["tokenizer.path=tokenizer.json"],
    **{
        ("quant", name): ["quant.emulate=true"]
        for name in ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8")
    },
    ("kernels", "fused"): ["runner=check"],
    ("runner", "eval"): ["runner.checkpoint=."],
    ("runner", "sample"): ["runner.checkpoint=.", "parallel=single"],
    ("runner", "plan"): ["hardware=h200"],
}


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=NAMES)
def test_every_option_composes_and_is_right(report, monkeypatch, group: str, option: str) -> None:
    monkeypatch.chdir(REPO)
    result = report(f"{group}={option}", *COMPANIONS.get((group, option), []))
    assert not result.problems
    assert result.cfg.hydra.runtime.choices[group] == option
    OmegaConf.to_container(OmegaConf.masked_copy(result.cfg, list(schema_keys.keys_of(schema.Config))), resolve=True)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(report, name: str) -> None:
    assert report(f"experiment={name}").problems == []
    master = report(f"experiment={name}", multirun=True)
    assert master.problems == []
    params = master.cfg.hydra.sweeper.params
    assert params, "the shipped experiments are sweeps"
    key, values = next(iter(params.items()))
    for value in values.split(","):
        assert report(f"experiment={name}", f"{key}={value}").problems == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_file_says_what_it_is_and_how_to_use_it(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert re.match(r"# \w.*(\.|\)|: .*)$", lines[0]), lines[0]
    assert lines[1].startswith("# titanyaml "), lines[1]


@pytest.mark.parametrize(("group", "option"), [pair for pair in OPTIONS if pair[0] != "plugin"])
def test_a_default_is_written_once(group: str, option: str) -> None:
    """A file holds its own group's keys, and only those that differ from the schema's default."""
    tree = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    tree.pop("defaults", None)  # what an option chooses beside itself: test_an_option_chooses_for_others_openly
    keys = schema_keys.keys_of(schema_keys.keys_of(schema.Config)[group].kind)
    assert set(tree) <= set(keys)
    assert not [name for name, value in tree.items() if value == keys[name].default]


def test_an_option_chooses_for_others_openly() -> None:
    """Runners leave out what they do not need; a device brings its links."""
    choosing = {option for option in OPTIONS if "defaults:" in (CONF / option[0] / f"{option[1]}.yaml").read_text()}
    devices = {
        ("hardware", name)
        for name in ("a100_40gb", "a100_80gb", "b200", "gh200", "h100_500w", "h100_pcie", "h100_sxm", "h200")
    }
    assert choosing == {("runner", "bench"), ("runner", "plan")} | devices


def test_no_option_name_reads_as_something_else() -> None:
    for group, option in OPTIONS:
        assert yaml.safe_load(option) == option, f"{group}={option}"


def test_every_section_that_can_be_chosen_is_a_group() -> None:
    groups = {group for group, _ in OPTIONS}
    sections = {key.name for key in schema_keys.keys_of(schema.Config).values() if key.is_section}
    assert sections - groups == {"run", "sweep"}
    assert groups - sections == {"plugin"}, "whose options go to pipeline.plugins"


@pytest.mark.parametrize("option", ["check", "plan", "train", "bench", "eval", "sample"])
def test_runner_targets_take_what_runners_are_given(option: str) -> None:
    target = yaml.safe_load((CONF / "runner" / f"{option}.yaml").read_text())["_target_"]
    function = instantiate.locate(target)
    assert function.__code__.co_varnames[: function.__code__.co_argcount] == ("config", "run", "env")


#: (name, vocabulary, width, blocks, heads, kv heads, head width, inner width, context, theta, epsilon, scaling, tied).
#: From the config.json files that the models were published with.
PUBLISHED = [
    ("llama3_1b", 128256, 2048, 16, 32, 8, 64, 8192, 131072, 5e5, 1e-5, 32.0, True),
    ("llama3_3b", 128256, 3072, 28, 24, 8, 128, 8192, 131072, 5e5, 1e-5, 32.0, True),
    ("llama3_8b", 128256, 4096, 32, 32, 8, 128, 14336, 131072, 5e5, 1e-5, 8.0, False),
    ("llama3_70b", 128256, 8192, 80, 64, 8, 128, 28672, 131072, 5e5, 1e-5, 8.0, False),
    ("llama3_405b", 128256, 16384, 126, 128, 8, 128, 53248, 131072, 5e5, 1e-5, 8.0, False),
    ("qwen3_0_6b", 151936, 1024, 28, 16, 8, 128, 3072, 40960, 1e6, 1e-6, None, True),
    ("qwen3_8b", 151936, 4096, 36, 32, 8, 128, 12288, 40960, 1e6, 1e-6, None, False),
    ("qwen3_32b", 151936, 5120, 64, 64, 8, 128, 25600, 40960, 1e6, 1e-6, None, False),
]
#: Parameters, a tied weight counted once (the published totals).
TOTALS = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
}


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_architectures_are_the_published_ones(compose, row: tuple) -> None:
    model = compose(f"model={row[0]}").model
    head_dim = model.head_dim or model.dim // model.num_heads
    factor = model.rope_scaling and model.rope_scaling.factor
    assert row == (
        model.name,
        model.vocab_size,
        model.dim,
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        head_dim,
        model.ffn_dim,
        model.max_seq_len,
        model.rope_theta,
        model.norm_eps,
        factor,
        model.tie_embeddings,
    )
    if factor:
        scaling = model.rope_scaling
        assert (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_seq_len) == (1.0, 4.0, 8192)
    qwen = row[0].startswith("qwen3")
    assert (model.qk_norm, model.family, model.attention_bias) == (qwen, "qwen3" if qwen else "llama3", False)
    attention = 2 * model.dim * head_dim * (model.num_heads + model.num_kv_heads) + 2 * head_dim * model.qk_norm
    block = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    embeddings = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    assert embeddings + model.num_layers * block + model.dim == TOTALS[row[0]]


def test_sequence_length_follows_the_model(compose) -> None:
    assert compose().train.seq_len == 512
    assert compose("model=llama3_8b").train.seq_len == 8192


def test_the_surface_grows_on_purpose() -> None:
    """tests/config/surface.txt lists every key; a new one is added there by hand."""
    listed = (Path(__file__).parent / "surface.txt").read_text().split()
    assert list(schema_keys.all_keys()) == listed


def test_every_key_is_read_by_something() -> None:
    """A key that only the schema mentions does nothing."""
    words = {key.rpartition(".")[2] for path in FILES for key in re.findall(r"\$\{([\w.]+)\}", path.read_text())}
    for path in (REPO / "src").rglob("*.py"):
        if path.name == "schema.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            words |= {getattr(node, "attr", ""), getattr(node, "arg", None) or ""}
            words |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    unread = [key for key in schema_keys.all_keys() if key.rpartition(".")[2] not in words]
    assert unread == []
