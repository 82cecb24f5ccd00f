"""Pipeline parallelism against one process, from the same initial weights, through the runner's own step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import make
from tests.plugins.parity import EVERYTHING, FULL, SELECTIVE, STEPS, TP, VOCAB, WHOLE, cp, train, whole
from tests.plugins.small import COMPILE, FSDP, Built, build, context, spec
from tests.plugins.test_tp import MIXED
from tests.ranks import run_ranks
from titanyaml import optim
from titanyaml.checkpoint import state as states
from titanyaml.config import schema
from titanyaml.distributed import norm
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.pipeline.resolve import resolve
from titanyaml.pipeline_parallel import execute
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS

PP = {"_target_": "titanyaml.plugins.pp.PipelineParallel"}


@dataclass(frozen=True)
class Case:
    dims: ParallelDims
    pp: dict[str, Any]
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    accumulation: int = 4
    model: dict[str, Any] = field(default_factory=dict)
    fused_loss: ClassVar[bool] = False
    steps: ClassVar[int] = STEPS

    def spec(self) -> schema.Model:
        return spec(**{"vocab_size": VOCAB, "num_layers": 8} | self.model)


class Recorded(execute._LossStage):
    """Notes what torch makes a stage do."""

    seen: ClassVar[list[str]] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"{self.stage_index}F{fwd_chunk_id}")
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        self.seen.append(f"{self.stage_index}{'B' if full_backward else 'I'}{bwd_chunk_id}")
        return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append(f"{self.stage_index}W{bwd_chunk_id}")
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def on_mesh(rank: int, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    torch.compiler.reset()
    warnings.simplefilter("ignore")
    original, execute._LossStage = execute._LossStage, Recorded
    try:
        return {name: on_one(case) for name, case in cases.items()}
    finally:
        execute._LossStage = original


def on_one(case: Case) -> dict[str, Any]:
    Recorded.seen.clear()
    built = built_on(case)
    result = train(built, case, Env.from_environ("cpu"))
    planned = [str(action) for action in built.model.partition.orders()[built.model.rank]]
    return result | {"planned": planned * STEPS, "done": list(Recorded.seen)}


EXPECTED: dict[Any, dict[str, Any]] = {}


def one_process(case: Case) -> dict[str, Any]:
    key = (case.accumulation, repr(case.model))
    if key not in EXPECTED:
        EXPECTED[key] = train(build({}, model_spec=case.spec()), case, Env.from_environ("cpu", environ={}))
    return EXPECTED[key]


def compare(cases: dict[str, Case], world_size: int) -> None:
    ranks = run_ranks(on_mesh, world_size, cases)
    for name, case in cases.items():
        expected = one_process(case)
        results = [rank[name] for rank in ranks]
        assert set().union(*(result["initial"] for result in results)) == set(expected["initial"]), name
        for result in results:
            assert result["done"] == result["planned"], name
            assert all(torch.equal(result["initial"][n], expected["initial"][n]) for n in result["initial"]), name
            assert result["losses"] == pytest.approx(expected["losses"], abs=1e-9, rel=0), name
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-8), name
            assert result["routing"] == [pytest.approx(row, rel=1e-9) for row in expected["routing"]], name
            for grads, expected_grads in zip(result["grads"], expected["grads"], strict=True):
                for parameter, grad in grads.items():
                    error = (grad - expected_grads[parameter]).norm()
                    assert error <= 1e-8 * expected_grads[parameter].norm(), (name, parameter)


def test_every_schedule_on_two_ranks() -> None:
    compare({name: Case(ParallelDims(pp=2), {"schedule": name}) for name in SCHEDULE_KINDS}, 2)


def test_every_schedule_on_four_ranks() -> None:
    pp4 = ParallelDims(pp=4)
    compare(
        {
            name: Case(pp4, {"schedule": name}, accumulation=kind.min_microbatches(4))
            for name, kind in SCHEDULE_KINDS.items()
        },
        4,
    )


def test_with_everything_in_a_block_and_tied_ends() -> None:
    pp2 = ParallelDims(pp=2)
    compare(
        {
            "1F1B": Case(pp2, {"schedule": "1F1B"}, {"ac": FULL}, model=EVERYTHING),
            "interleaved": Case(pp2, {"schedule": "InterleavedZeroBubble"}, model=EVERYTHING),
            "looped": Case(pp2, {"schedule": "LoopedBFS"}, {"ac": SELECTIVE}, model=EVERYTHING),
            "v": Case(pp2, {"schedule": "ZBVZeroBubble"}, model=EVERYTHING),
            "compiled": Case(pp2, {"schedule": "1F1B"}, {"compile": COMPILE}, model=EVERYTHING),
        },
        2,
    )


def test_with_sharded_stages() -> None:
    dims, fsdp = ParallelDims(pp=2, dp_shard=2), {"fsdp": FSDP}
    compare(
        {
            "GPipe": Case(dims, {"schedule": "GPipe"}, fsdp),
            "1F1B": Case(dims, {"schedule": "1F1B"}, {"ac": FULL, "fsdp": FSDP}, model=EVERYTHING),
            "looped": Case(dims, {"schedule": "InterleavedZeroBubble"}, fsdp, model=EVERYTHING),
            "v": Case(dims, {"schedule": "DualPipeV"}, fsdp),
            "always": Case(
                dims, {"schedule": "Interleaved1F1B"}, {"fsdp": {**FSDP, "reshard_after_forward": "always"}}
            ),
        },
        4,
    )


def test_with_split_matrices() -> None:
    dims, tp = ParallelDims(pp=2, tp=2), {"tp": TP}
    compare(
        {
            "1F1B": Case(dims, {"schedule": "1F1B"}, {"tp": TP, "ac": FULL}, model=EVERYTHING),
            "v": Case(dims, {"schedule": "ZBVZeroBubble"}, tp),
            "whole sequence": Case(dims, {"schedule": "LoopedBFS"}, {"tp": WHOLE}),
        },
        4,
    )


def test_with_split_sequences() -> None:
    dims = ParallelDims(pp=2, cp=2)
    compare(
        {
            "1F1B": Case(
                dims, {"schedule": "1F1B"}, {"cp": cp("allgather"), "ac": FULL, "fsdp": FSDP}, model=EVERYTHING
            ),
            "v": Case(dims, {"schedule": "DualPipeV"}, {"cp": cp("ring"), "fsdp": FSDP}),
            "looped": Case(dims, {"schedule": "LoopedBFS"}, {"cp": cp("ulysses"), "fsdp": FSDP}),
        },
        4,
    )


def test_with_spread_experts() -> None:
    """Every second block is a mixture."""
    mixture = {
        "moe": schema.MoE(
            num_experts=4,
            top_k=2,
            ffn_dim=24,
            shared_ffn_dim=16,
            every=2,
            score="sigmoid",
            normalize=True,
            bias_rate=0.01,
            balance_loss=0.05,
        )
    }
    ep = {"ep": {"_target_": "titanyaml.plugins.ep.ExpertParallel"}, "fsdp": FSDP}
    dims = ParallelDims(pp=2, dp_shard=2, ep=2)
    compare(
        {
            "1F1B": Case(dims, {"schedule": "1F1B"}, {**ep, "ac": FULL}, model=mixture),
            "looped": Case(dims, {"schedule": "LoopedBFS"}, {**ep, "compile": COMPILE}, model=mixture),
            "GPipe": Case(dims, {"schedule": "GPipe"}, ep, model=mixture | {"tie_embeddings": True}),
        },
        4,
    )


ODD = """0F0,1F0,0F1,1F1,,1B0,0B0,1B1,0B1
,,2F0,2I0,2F1,2W0,2B1"""


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """Three stages on two ranks, two of them neighbours on one rank, and one backward in two parts."""
    (tmp_path / "odd.csv").write_text(ODD)
    file = {"schedule_csv": str(tmp_path / "odd.csv")}
    compare({"odd": Case(ParallelDims(pp=2), file, accumulation=2, model=EVERYTHING)}, 2)


def mixed(rank: int, case: Case) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    built = build(
        {"pp": {**PP, **case.pp}, **case.nodes},
        model_spec=case.spec(),
        dims=case.dims,
        mesh=case.dims.build("cpu"),
        accumulation=case.accumulation,
        **MIXED,
    )
    dtypes = {parameter.dtype for parameter in built.model.parameters()}
    return train(built, case, Env.from_environ("cpu")) | {"dtypes": dtypes}


@pytest.mark.parametrize("dims", [ParallelDims(pp=2), ParallelDims(pp=2, dp_shard=2)], ids=["pp2", "pp2_fsdp2"])
def test_split_backwards_in_bfloat16_add_up_in_float32(dims: ParallelDims) -> None:
    """As whole ones do. Torch's backward by weight calls no hook: left alone its results are added up in bfloat16."""
    case = Case(dims, {"schedule": "1F1B"}, {"fsdp": FSDP}, 8)
    whole_ones = run_ranks(mixed, dims.world_size, case)
    parts = run_ranks(mixed, dims.world_size, replace(case, pp={"schedule": "ZBVZeroBubble"}))
    expected = {name: grad for rank in whole_ones for name, grad in rank["grads"][0].items()}
    for rank in parts:
        assert rank["dtypes"] == {torch.bfloat16 if dims.dp_shard == 1 else torch.float32}
        assert rank["losses"][0] == pytest.approx(whole_ones[0]["losses"][0], rel=1e-6)
        for name, grad in rank["grads"][0].items():
            assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def state(built: Built) -> dict[str, Any]:
    named = dict(built.model.named_parameters())
    inner = optim.build(schema.Optim(), named, masters={}, device="cpu")
    return {"model": named, "optim": inner.state_tensors()}


def saved(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    """Weights and moments, which tell one from another, as whole tensors."""
    built = built_on(case)
    saved_state = state(built)
    with torch.no_grad():
        for name, tensors in saved_state["optim"].items():
            tensors["exp_avg"].copy_(saved_state["model"][name] * 2)
    make(Path(path), env=Env.from_environ("cpu")).save(1, saved_state, {"position": 0})
    return {name: whole(tensor) for name, tensor in states.flatten(saved_state).items()}


def loaded(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    loaded_state = state(built_on(case))
    with torch.no_grad():
        for tensor in states.flatten(loaded_state).values():
            tensor.zero_()
    checkpoints = make(Path(path), env=Env.from_environ("cpu"))
    checkpoints.load(checkpoints.latest(), loaded_state)
    return {name: whole(tensor) for name, tensor in states.flatten(loaded_state).items()}


def built_on(case: Case) -> Built:
    mesh = case.dims.build("cpu") if case.dims.world_size > 1 else None
    nodes = {"pp": {**PP, **case.pp}, **case.nodes}
    return build(
        nodes,
        model_spec=case.spec(),
        dims=case.dims,
        mesh=mesh,
        accumulation=case.accumulation,
        expert_mesh=case.dims.build_experts("cpu") if mesh is not None else None,
    )


def test_checkpoints_are_read_by_every_mesh(tmp_path: Path) -> None:
    """Of tied ends too, whose weight two ranks hold and the checkpoint once."""
    tied = {"tie_embeddings": True}
    pipe = Case(ParallelDims(pp=2), {"schedule": "Interleaved1F1B"}, {}, model=tied)
    cases = [
        Case(ParallelDims(), {}, {}, model=tied),
        Case(ParallelDims(tp=2), {}, {"tp": TP}, model=tied),
        Case(ParallelDims(dp_shard=2), {}, {"fsdp": FSDP}, model=tied),
    ]
    from_pipeline = merged(run_ranks(saved, 2, str(tmp_path / "pipe"), pipe))
    assert len(from_pipeline) == 4 * len(dict(build({}, model_spec=pipe.spec()).model.named_parameters()))
    for index, case in enumerate(cases):
        ranks = case.dims.world_size
        assert_same(merged(run_ranks(loaded, ranks, str(tmp_path / "pipe"), case)), from_pipeline)
        back = str(tmp_path / str(index))
        assert_same(merged(run_ranks(saved, ranks, back, case)), from_pipeline)
        assert_same(merged(run_ranks(loaded, 2, back, pipe)), from_pipeline)


def merged(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks hold together; where two have the same, it is the same."""
    everything: dict[str, Tensor] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            assert torch.equal(everything.setdefault(name, tensor), tensor), name
    return everything


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)] == []


def norms(rank: int) -> list[float]:
    mesh = ParallelDims(pp=2).build("cpu")
    grads = [torch.tensor([3.0, -1.0]), torch.tensor([4.0])] if rank == 0 else [torch.tensor([12.0])]
    return [float(norm.grad_norm(grads, norm_type=kind, stages=mesh.get_group("pp"))) for kind in (2.0, float("inf"))]


def test_every_stage_counts_in_the_norm() -> None:
    assert run_ranks(norms, 2) == [[pytest.approx(170**0.5), 12.0]] * 2


def test_off_and_refused(tmp_path: Path) -> None:
    assert resolve({"pp": PP}, context(spec())).off == {"pp": "parallel.pp is 1"}
    for node, accumulation, text in [
        ({"schedule": "nonsense"}, 2, "is 'nonsense'"),
        ({"schedule": "1F1B", "stages_per_rank": 2}, 2, "parallel.pp_stages_per_rank: is 2, which 1F1B cannot run"),
        ({"schedule": "ZBVZeroBubble"}, 2, "2 microbatches of . sequences do not fill ZBVZeroBubble on 2 ranks"),
        ({"schedule": "Interleaved1F1B", "stages_per_rank": 3}, 2, "is 4, fewer than the 6 stages of 2 pipeline ranks"),
        ({"stages": ["1", "2"]}, 2, "the stages have 3 layers, the model 4"),
        ({"schedule_csv": str(tmp_path / "no.csv")}, 2, "No such file"),
    ]:
        with pytest.raises(PipelineError, match=text):
            resolve({"pp": {**PP, **node}}, context(spec(), dims=ParallelDims(pp=2), accumulation=accumulation))
    nodes = {"pp": {**PP, "schedule": "DualPipeV"}, "compile": COMPILE, "ac": FULL}
    with pytest.raises(PipelineError) as error:
        resolve(nodes, context(spec(), dims=ParallelDims(pp=2), accumulation=4))
    assert [problem.key for problem in error.value.problems] == ["compile.mode", "ac.mode"]
