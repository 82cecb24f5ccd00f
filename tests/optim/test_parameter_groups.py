from __future__ import annotations

import pytest
import torch

from titanyaml.config.schema import Optim, ParamGroup
from titanyaml.errors import ConfigError
from titanyaml.optim.parameter_groups import ParameterGroup, make_groups

PARAMS = {
    "tok_embeddings.weight": torch.zeros(4, 2),
    "layers.0.attention.wq.weight": torch.zeros(2, 2),
    "layers.0.attention.wq.bias": torch.zeros(2),
    "layers.0.ffn_norm.weight": torch.zeros(2),
    "output.weight": torch.zeros(4, 2),
}


def groups(*rules: ParamGroup) -> list[ParameterGroup]:
    return make_groups(Optim(weight_decay=0.1, groups=list(rules)), PARAMS)


def test_norms_and_biases_never_decay() -> None:
    assert groups() == [
        ParameterGroup(("tok_embeddings.weight", "layers.0.attention.wq.weight", "output.weight"), 1.0, 0.1),
        ParameterGroup(("layers.0.attention.wq.bias", "layers.0.ffn_norm.weight"), 1.0, 0.0),
    ]


def test_the_first_match_wins_and_matrices_take_the_groups_decay() -> None:
    actual = groups(
        ParamGroup(r"^output\.", lr_scale=0.5, weight_decay=0.0),
        ParamGroup("wq|output", lr_scale=2.0, weight_decay=0.3),
    )
    assert actual == [
        ParameterGroup(("output.weight",), 0.5, 0.0),
        ParameterGroup(("layers.0.attention.wq.weight",), 2.0, 0.3),
        ParameterGroup(("layers.0.attention.wq.bias",), 2.0, 0.0),
        ParameterGroup(("tok_embeddings.weight",), 1.0, 0.1),
        ParameterGroup(("layers.0.ffn_norm.weight",), 1.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("rules", "key", "text"),
    [
        ([ParamGroup("embedings")], "optim.groups.0.pattern", "tok_embeddings.weight"),
        ([ParamGroup(r"^outputs\.weight$")], "optim.groups.0.pattern", "nearest names: output.weight"),
        ([ParamGroup("(")], "optim.groups.0.pattern", "no regular expression"),
        ([ParamGroup("layers"), ParamGroup("wq")], "optim.groups.1.pattern", "earlier patterns took"),
        ([ParamGroup("norm", weight_decay=0.2)], "optim.groups.0.weight_decay", "0.2 for norms and biases only"),
    ],
    ids=["misspelled", "anchored", "no regex", "shadowed", "decay of norms"],
)
def test_a_pattern_without_effect_is_refused(rules: list[ParamGroup], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        groups(*rules)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        groups(ParamGroup("("), ParamGroup("nothing_like_it"))
    assert len(caught.value.problems) == 2
