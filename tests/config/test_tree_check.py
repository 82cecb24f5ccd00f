"""Every kind of mistake that the schema shows, with its text."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from titanyaml.config import schema, tree_check


@pytest.fixture
def check():
    """``check({"optim.lr": "abc"})``: the defaults of a small model with these values put in, untyped."""
    base = OmegaConf.to_container(
        OmegaConf.structured(
            schema.Config(
                model=schema.Model(
                    name="m",
                    vocab_size=300,
                    dim=8,
                    num_layers=1,
                    num_heads=2,
                    num_kv_heads=1,
                    ffn_dim=8,
                    max_seq_len=64,
                ),
                data=schema.Data(kind="stdlib"),
                tokenizer=schema.TokenizerConfig(kind="bytes"),
                runner=schema.Runner(name="train", _target_="titanyaml.runner.train.train"),
            )
        ),
        resolve=False,
    )

    def check_values(values: dict | None = None, *, partial: bool = False) -> tree_check.CheckedTree:
        cfg = OmegaConf.create(base)
        for key, value in (values or {}).items():
            OmegaConf.update(cfg, key, value, force_add=True)
        return tree_check.check_tree(cfg, partial=partial)

    return check_values


@pytest.fixture
def only_problem(check):
    """The only problem of a tree with one wrong value."""

    def problem(key: str, value):
        problems = check({key: value}).problems
        assert len(problems) == 1, problems
        return problems[0]

    return problem


def test_the_defaults_are_right(check) -> None:
    tree = check()
    assert tree.problems == [] and tree.bad == set()
    assert tree.values["train"]["seq_len"] == 64
    assert tree.literal["train"]["seq_len"] == "${titan.min:${model.max_seq_len},8192}"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optim.lrr", "optim.lr"),
        ("optm", "optim"),
        ("model.rope_scale", "model.rope_scaling"),
        ("optim.warmup_steps", "schedule.warmup_steps"),  # right name, wrong section
        ("trian.steps", "train"),
        ("optim.groups_", "optim.groups"),
    ],
)
def test_unknown_keys_name_the_nearest(check, key: str, near: str) -> None:
    (problem,) = check({key: 1}).problems
    assert problem.message == f"unknown key; did you mean {near}?"


def test_items_of_a_list_are_among_its_choices(only_problem) -> None:
    problem = only_problem("compile.async_tp_ops", ["all_gather", "all_reduce"])
    assert (problem.key, problem.allowed) == ("compile.async_tp_ops[1]", "all_gather, reduce_scatter, auto")
    assert problem.hint == "", "a key inside a list cannot be typed"


def test_a_list_with_choices_names_them(only_problem) -> None:
    problem = only_problem("compile.async_tp_ops", "all_gather")
    assert (problem.allowed, problem.hint) == (
        "a list of all_gather, reduce_scatter, auto",
        "compile.async_tp_ops=[all_gather]",
    )


def test_unknown_key_like_nothing(only_problem) -> None:
    assert only_problem("zzz", 1).message == "unknown key"


def test_unknown_key_in_a_list_of_sections(check) -> None:
    (problem,) = check({"optim.groups": [{"pattern": "a", "lr": 1}]}).problems
    assert (problem.key, problem.message) == ("optim.groups[0].lr", "unknown key; did you mean optim.lr?")


@pytest.mark.parametrize(
    ("key", "value", "got"),
    [
        ("train.steps", 1e3, 1000),
        ("train.steps", 7, 7),
        ("optim.lr", 1, 1.0),
        ("run.name", 2024, "2024"),
        ("train.max_norm", None, None),
        ("data.validation_fraction", 0, 0.0),
    ],
)
def test_values_that_are_taken(check, key: str, value, got) -> None:
    tree = check({key: value})
    assert tree.problems == []
    section, name = key.split(".")
    assert tree.values[section][name] == got and type(tree.values[section][name]) is type(got)


@pytest.mark.parametrize(
    ("key", "value", "allowed", "hint"),
    [
        ("train.steps", "10k", "an integer >= 1", ""),
        ("train.steps", 1.5, "an integer >= 1", "train.steps=1 or train.steps=2"),
        ("train.steps", "010", "an integer >= 1", ""),
        ("train.steps", True, "an integer >= 1", ""),
        ("train.steps", 0, "an integer >= 1", "train.steps=1"),
        ("train.steps", None, "an integer >= 1", ""),
        ("train.global_batch", "x", "an integer >= 1, or null", ""),
        ("optim.lr", "3e-4x", "a finite number > 0", ""),
        ("optim.lr", float("nan"), "a finite number > 0", ""),
        ("optim.lr", float("inf"), "a finite number > 0", ""),
        ("optim.lr", 0, "a finite number > 0", ""),
        ("optim.beta1", 1, "a finite number >= 0 and < 1", ""),
        ("schedule.min_lr_ratio", 2, "a finite number >= 0 and <= 1", "schedule.min_lr_ratio=1"),
        ("run.deterministic", "yes", "true or false", "run.deterministic=true"),
        ("run.deterministic", 0, "true or false", "run.deterministic=false"),
        ("run.name", 1e3, "a text", "'run.name=\"1000.0\"'"),
        ("run.name", True, "a text", "'run.name=\"true\"'"),
        ("schedule.kind", "cosin", "cosine, linear, wsd, constant", "schedule.kind=cosine"),
        ("optim", 3, "a section with name, lr, beta1, beta2, eps, weight_decay, implementation, master, groups", ""),
        ("optim", None, "a section", ""),
        ("optim.groups", 3, "a list of sections", "optim.groups=[3]"),
        ("user", 3, "a mapping of names to values", ""),
    ],
)
def test_values_that_are_refused(only_problem, key: str, value, allowed: str, hint: str) -> None:
    problem = only_problem(key, value)
    assert problem.key == key
    assert problem.message == ("is null" if value is None else f"is {value!r}")
    assert (problem.allowed, problem.hint) == (allowed, hint)


def test_texts_in_a_list(check) -> None:
    tree = check({"data.kind": "files", "data.paths": ["a", 1.5]})
    assert [problem.key for problem in tree.problems] == ["data.paths[1]"]
    tree = check({"data.kind": "files", "data.paths": ["${run.name}/x"]})
    assert tree.values["data"]["paths"] == ["m/x"]


def test_optional_sections(check) -> None:
    tree = check({"model.rope_scaling": {"factor": 4}})
    assert tree.problems == [] and tree.values["model"]["rope_scaling"] == {"factor": 4.0}
    assert check({"model.rope_scaling": None}).problems == []
    (problem,) = check({"model.rope_scaling": {"factr": 4}}).problems
    assert problem.hint == "model.rope_scaling.factor=4"


def test_missing_values(only_problem, check) -> None:
    problem = only_problem("model.ffn_dim", "???")
    assert (problem.message, problem.hint) == ("is required and has no value", "model.ffn_dim=...")
    assert only_problem("user.a", "???").key == "user.a"
    assert [p.key for p in check({"optim.groups": [{"lr_scale": 2}]}).problems] == ["optim.groups[0].pattern"]


def test_a_reference_to_a_missing_value_is_told_once(check) -> None:
    assert [p.key for p in check({"model.max_seq_len": "???"}).problems] == ["model.max_seq_len"]


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("run.name", "${modle.name}", "'${modle.name}' refers to modle.name, which does not exist", "${model.name}"),
        ("run.name", "x-${optim.lrr}", "'x-${optim.lrr}' refers to optim.lrr, which does not exist", "${optim.lr}"),
        (
            "run.name",
            "${titan.mni:1,2}",
            "'${titan.mni:1,2}' uses the unknown resolver 'titan.mni'",
            "${titan.min:...}",
        ),
        ("run.name", "${run.name}", "'${run.name}' cannot be resolved: Recursive interpolation detected", ""),
        ("train.steps", "${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found", ""),
        ("user.x", ["${nope}"], "'${nope}' refers to nope, which does not exist", ""),
        ("run.dir", "${hydra:runtime.output_dir}", "needs Hydra's run time", ""),
    ],
)
def test_interpolations_that_lead_nowhere(check, key: str, value, message: str, hint: str) -> None:
    problem = next(p for p in check({key: value}).problems if p.key.startswith(key))
    assert message in problem.message
    assert not hint or problem.hint == hint


def test_the_value_behind_an_interpolation_has_the_type_of_its_holder(only_problem) -> None:
    problem = only_problem("train.steps", "${optim.name}")
    assert (problem.key, problem.message) == ("train.steps", "is 'adamw'")


def test_a_reference_to_a_wrong_value_is_told_once(check) -> None:
    """run.dir refers to run.name."""
    assert [p.key for p in check({"run.name": "${nope}"}).problems] == ["run.name"]


def test_text_that_would_come_alive_is_refused(check) -> None:
    (problem,) = check({"run.name": r"a\${x}"}).problems
    assert problem.key == "run.name" and "without '${'" in problem.allowed


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        (
            {"data.max_files": 3, "data.kind": "synthetic"},
            "data.max_files",
            "data.max_files=null or data.kind=stdlib or data.kind=files",
        ),
        ({"runner.prompt": "x"}, "runner.prompt", "'runner.prompt=\"def \"' or runner.name=sample"),
        (
            {"quant.product": "own", "quant.grad_dtype": "e4m3", "quant.recipe": "mxfp8"},
            "quant.product",
            "quant.product=torchao quant.grad_dtype=auto or quant.recipe=float8_tensorwise or "
            "quant.recipe=float8_rowwise or quant.recipe=float8_rowwise_with_gw_hp",
        ),
        (
            {"tokenizer.vocab_size": 300},
            "tokenizer.vocab_size",
            "tokenizer.vocab_size=null or tokenizer.kind=sentencepiece",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused(check, values: dict, key: str, hint: str) -> None:
    (problem,) = check(values).problems
    assert problem.key == key and "but nothing reads it" in problem.message
    assert problem.hint == hint


def test_a_key_is_not_unread_because_its_switch_is_wrong(check) -> None:
    assert [p.key for p in check({"data.max_files": 3, "data.kind": "stdlibb"}).problems] == ["data.kind"]


@pytest.mark.parametrize("group", ["experiment", "local", "plugin"])
def test_a_file_without_its_header_is_named(only_problem, group: str) -> None:
    problem = only_problem(group, {"optim": {"lr": 1}})
    assert "the first line of the file" in problem.hint and "# @package" in problem.hint


def test_everything_is_told_in_the_order_of_the_tree(check) -> None:
    tree = check({"train.steps": "x", "model.dimm": 3, "optim.lr": -1, "run.seed": -1})
    assert [problem.key for problem in tree.problems] == ["run.seed", "model.dimm", "optim.lr", "train.steps"]
    assert tree.bad == {"run.seed", "model.dimm", "optim.lr", "train.steps"}
    assert "lr" not in tree.values["optim"] and tree.values["optim"]["beta1"] == 0.9


def test_the_common_part_of_a_sweep_may_be_unfinished(check) -> None:
    values = {"model.dim": "???", "run.name": "${nope}", "data.max_files": 3, "data.kind": "synthetic"}
    assert check(values, partial=True).problems == []
    assert [p.key for p in check({**values, "optim.lrr": 1}, partial=True).problems] == ["optim.lrr"]


def test_a_typed_tree_is_checked_too(compose) -> None:
    assert [p.key for p in tree_check.check_tree(compose("+optim.lrr=1")).problems] == ["optim.lrr"]
    assert tree_check.check_tree(compose()).problems == []
