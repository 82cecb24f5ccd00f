"""What tensor parallelism splits, stores and refuses; that it computes the same stands in test_parity.py."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.parity import TP, VOCAB, WHOLE, Case, on_mesh, one_process
from tests.plugins.small import FSDP, SEQ, build, context, spec
from tests.ranks import run_ranks
from titanyaml import machine
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import DataError, PipelineError
from titanyaml.loss import CrossEntropy
from titanyaml.pipeline.resolve import resolve

MIXED = {"param_dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
TP2, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)
PLAIN = Case(TP2, {"tp": TP})


def test_bfloat16_weights_have_float32_masters_on_a_tp_only_mesh() -> None:
    case = Case(TP2, {"tp": TP, "fsdp": FSDP}, 2)
    expected, exact = one_process(case, **MIXED), one_process(case, **MIXED | {"compute_dtype": torch.float32})
    ranks = run_ranks(on_mesh, 2, case, MIXED)
    for rank in ranks:
        assert rank["dtypes"] == {torch.bfloat16}
        assert rank["masters"] == rank["names"]
        assert all(value.dtype == torch.float32 for value in (*rank["final"].values(), *rank["grads"][0].values()))
        assert rank["losses"] == pytest.approx(expected["losses"], rel=5e-3)
        assert all(torch.equal(rank["final"][n], value) for n, value in ranks[0]["final"].items()), "ranks drift apart"
        # as far from float32 as one process in bfloat16 is, and not much farther
        for name, grad in exact["grads"][0].items():
            error, usual = (got["grads"][0][name] - grad for got in (rank, expected))
            assert error.norm() < 2 * usual.norm() + 1e-3 * grad.norm(), name
    assert expected["losses"] != exact["losses"]


@pytest.mark.skipif(bool(machine.gpus()), reason="ranks have no GPU, and kernels no interpreter")
@pytest.mark.parametrize(("node", "model"), [(TP, {}), (WHOLE, {"tie_embeddings": True})], ids=["sequence", "tied"])
def test_the_fused_loss_of_a_model_against_one_process_in_float64(node: dict, model: dict) -> None:
    pytest.importorskip("triton", reason="triton cannot be imported")
    single = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), torch.float32)
    expected = one_process(Case(TP2, {}, model=model, steps=1))
    for rank in run_ranks(on_mesh, 2, Case(TP2, {"tp": node}, model=model, fused_loss=True, steps=1), single):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for name, grad in expected["grads"][0].items():
            assert (rank["grads"][0][name] - grad).norm() < 1e-5 * grad.norm(), name


def forward(rank: int, case: Case, token: int) -> str:
    built = build(case.nodes, model_spec=case.spec(), dims=case.dims, mesh=case.dims.build("cpu"))
    tokens = torch.full((1, SEQ), 5)
    tokens[0, 3] = token
    with pytest.raises(DataError) as error:
        built.model(tokens, labels_BS=tokens, loss_fn=CrossEntropy(chunk_tokens=8))
    return error.value.message


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_no_rank_owns(token: int) -> None:
    message = f"token id {token} is outside the vocabulary of {VOCAB} ids"
    assert run_ranks(forward, 2, PLAIN, token) == [message, message]


def test_the_change_names_what_is_split_and_what_is_whole() -> None:
    [rank, _] = run_ranks(on_mesh, 2, PLAIN, {})
    assert rank["changes"]["tp"].summary == (
        "30 modules over tp(2), 9 norms replicated; vocabulary and loss by 48 ids, the residual stream by sequence"
    )
    assert len(rank["changes"]["tp"].modules) == 39 and "output" in rank["changes"]["tp"].modules


def replaced(rank: int) -> str:
    from titanyaml.models import decoder
    from titanyaml.plugins.tp import TensorParallel

    case = PLAIN
    model = decoder.build(case.spec())
    model.layers[1].attention.wq = torch.nn.Identity()
    with pytest.raises(PipelineError) as error:
        TensorParallel().apply(model, context(case.spec(), dims=case.dims, mesh=case.dims.build("cpu")))
    return error.value.problems[0].message


def test_a_layer_of_another_kind_is_not_left_whole_in_silence() -> None:
    message = "layers.1.attention.wq is a Identity, which cannot be split; only Linear can"
    assert run_ranks(replaced, 2) == [message, message]


def test_off_and_refused() -> None:
    assert resolve({"tp": TP}, context(spec())).off == {"tp": "parallel.tp is 1"}
    with pytest.raises(PipelineError) as error:
        resolve({"tp": TP}, context(spec(ffn_dim=55), dims=ParallelDims(tp=4), seq_len=18))
    assert [(problem.key, problem.hint) for problem in error.value.problems] == [
        ("model.num_kv_heads", "model.num_kv_heads=4"),
        ("model.ffn_dim", "model.ffn_dim=52 or model.ffn_dim=56"),
        ("model.vocab_size", "model.vocab_size=96 or model.vocab_size=100"),
        ("train.seq_len", "train.seq_len=16 or train.seq_len=20"),
    ]
