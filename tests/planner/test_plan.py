"""A plan's parts: they add up, they move the right way, and what it says of itself holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titanyaml.config import schema
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError
from titanyaml.planner.model import cost, devices, from_config, memory, operators, primitives, step
from titanyaml.planner.model.inputs import FUSED, TITANYAML, Mesh
from titanyaml.planner.model.plan import plan_job
from titanyaml.planner.model.uncertainty import relative_range
from titanyaml.planner.report import render
from titanyaml.planner.report.remarks import remarks_on
from titanyaml.planner.search import remedies
from titanyaml.runner import run_report


def test_published_sizes(job) -> None:
    shape = job().shape
    assert shape.num_params == 8_030_261_248
    assert shape.flops_per_token(8192) == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192


def test_seconds_add_up(job) -> None:
    planned_step = step.plan_step(job(accumulation=3, mesh=Mesh(dp_shard=4, tp=2)))
    assert sum(planned_step.classes.values()) == pytest.approx(planned_step.seconds)
    assert {"gemm", "attention", "elementwise", "optimizer", "exposed_comm", "bubble"} < set(planned_step.classes)


def test_gemm_seconds_by_hand(job) -> None:
    square = primitives.Gemm("x", 8192, 8192, 8192)
    assert cost.gemm_seconds(job(), square) == pytest.approx(2 * 8192**3 / 560e12 * (1 + 110 * 3 / 8192))
    narrow = primitives.Gemm("x", 8192, 8, 8192)  # bound by its operands
    assert cost.gemm_seconds(job(), narrow) > narrow.flops / 560e12 * 10


@pytest.mark.parametrize(
    ("mesh", "axis", "rate"),
    [
        (Mesh(dp_shard=8), "shard", 270e9),  # within a host
        (Mesh(dp_shard=16), "shard", 270e9),  # eight cards carry more than NVLink
        (Mesh(dp_shard=32, tp=8), "shard", 40e9),  # one card
        (Mesh(dp_shard=32, tp=2), "shard", 4 * 40e9),
        (Mesh(dp_shard=32, tp=8), "tp", 270e9),
        (Mesh(tp=16), "tp", 270e9),
        (Mesh(dp_replicate=2, dp_shard=8), "dp_replicate", 40e9),
    ],
)
def test_group_uses_a_network_card_for_each_rank_in_a_host(job, mesh: Mesh, axis: str, rate: float) -> None:
    assert job(mesh=mesh).network.rate(mesh, axis) == pytest.approx(rate)


def test_accumulation_repeats_microbatches_but_not_the_optimizer(job) -> None:
    single, double = (step.plan_step(job(accumulation=count)) for count in (1, 2))
    assert double.classes["gemm"] == pytest.approx(2 * single.classes["gemm"])
    assert double.classes["optimizer"] == single.classes["optimizer"]


@pytest.mark.parametrize(
    ("schedule", "stages", "idle"), [("1F1B", 1, 7 / 15), ("Interleaved1F1B", 2, 3.5 / 11.5), ("ZBVZeroBubble", 2, 0.0)]
)
def test_bubble_is_that_of_the_schedule(job, schedule: str, stages: int, idle: float) -> None:
    planned_step = step.plan_step(
        job(mesh=Mesh(pp=8), local_batch=8, microbatches=8, schedule=schedule, stages_per_rank=stages)
    )
    assert planned_step.bubble == pytest.approx(idle, rel=0.05)


def test_first_and_last_stage_are_shorter(job) -> None:
    uneven = job(shape=replace(job().shape, num_layers=126), mesh=Mesh(pp=8), local_batch=8, microbatches=8)
    assert uneven.layers_of_ranks == (15, 16, 16, 16, 16, 16, 16, 15)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"ac": "full"}, "activations"),
        ({"local_batch": 1}, "activations"),
        ({"mesh": Mesh(dp_shard=16)}, "optimizer"),
        ({"moment_bytes": 2.1}, "optimizer"),
        ({"chunk_tokens": 128}, "logits"),
    ],
)
def test_changes_that_save_memory(job, changed: dict, part: str) -> None:
    assert memory.plan_memory(job(**changed)).parts[part] < memory.plan_memory(job()).parts[part]


def test_one_gpu_peaks_at_the_end_of_backward(job) -> None:
    """8B in bf16 with fp32 masters: 16 bytes a parameter, 18 where gradients are summed in fp32."""
    one_gpu = {"mesh": Mesh(), "local_batch": 1, "ac": "full", "software": FUSED}
    planned = memory.plan_memory(job("h200", **one_gpu))
    assert planned.total == pytest.approx(16 * 8_030_261_248 + 0.4 * memory.GIB)
    summed = memory.plan_memory(job("h200", **one_gpu | {"software": TITANYAML}))
    assert summed.total - planned.total == pytest.approx(2 * 8_030_261_248)
    split = memory.plan_memory(job("h200", **one_gpu, master_bytes=2))
    assert planned.total - split.total == pytest.approx(2 * 8_030_261_248)


def test_split_masters_halve_gradient_shards(job) -> None:
    """Where a step has one backward pass; weights and what is missing for float32 take the four bytes of a shard."""
    two_ranks = {"mesh": Mesh(dp_shard=2), "local_batch": 1, "ac": "full", "software": FUSED}
    for accumulation, saved in ((1, 2), (2, 0)):
        two_ranks["accumulation"] = accumulation
        whole, split = (memory.plan_memory(job("h200", **two_ranks, master_bytes=size)) for size in (4, 2))
        assert whole.total - split.total == pytest.approx(saved * 8_030_261_248 / 2)


@pytest.mark.parametrize(
    "typed",
    [
        "model=llama3_8b hardware=h100_sxm parallel=fsdp8 train.local_batch=8 ac=none",
        "model=llama3_8b hardware=h100_sxm parallel=single train.local_batch=1 ac=full",
        "model=llama3_405b hardware=h100_sxm parallel=fsdp8_tp8_pp2 train.local_batch=8 ac=full",
        "model=llama4_17bx128e hardware=a100_40gb parallel=cp8 train.local_batch=1 ac=full",
        "model=llama3_8b hardware=h100_sxm parallel=fsdp2 train.local_batch=4 ac=selective_op ac.keep_products=0.8 "
        "optim.implementation=foreach",  # keys that a change leaves unread
    ],
)
def test_remedies_fit_and_differ_in_kind(configure, typed: str) -> None:
    config = configure(*typed.split())
    planned = plan_job(from_config.job(config))
    search = remedies.find_remedies(config, planned)
    found_remedies = search.remedies
    assert not planned.fits and len(found_remedies) == 3 and search.remark() == ""
    assert len({remedy.kinds for remedy in found_remedies}) == 3, "different in kind"
    slowdowns = [remedy.slowdown for remedy in found_remedies]
    assert slowdowns == sorted(slowdowns)
    for remedy in found_remedies:
        changed = plan_job(from_config.job(configure(*typed.split(), *remedy.typed.split())))
        assert changed.fits and changed.job.mesh.world_size == remedy.devices
        assert changed.tps == pytest.approx(remedy.tps)
        assert remedy.tps == pytest.approx((1 - remedy.slowdown) * planned.tps)


def test_no_remedies_for_what_fits(configure) -> None:
    config = configure("model=llama3_8b", "parallel=fsdp8", "train.local_batch=1")
    assert remedies.find_remedies(config, plan_job(from_config.job(config))).remedies == []


def test_nearest_remedy_is_named_where_few_fit(configure) -> None:
    typed = ["model=llama3_8b", "parallel=fsdp8", "train.local_batch=1"]
    config = configure(*typed)
    search = remedies.find_remedies(config, plan_job(from_config.job(config)), limit_gib=2.0)
    assert search.remedies == [] and search.over_gib > 0
    assert search.remark().startswith("none of the changes that were tried makes it fit; the nearest, ")
    nearest = from_config.job(configure(*typed, *search.nearest.split()))
    assert memory.plan_memory(nearest).with_margin / memory.GIB - 2.0 == pytest.approx(search.over_gib)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mesh": Mesh(tp=16, dp_shard=2), "shape": None}, "spans hosts of 8"),
        (
            {"mesh": Mesh(tp=8, dp_shard=2), "quant": "float8_rowwise"},
            "float8 gains nothing in wq, wk, wv, wo, w1, w3, w2",
        ),
        ({"mesh": Mesh(pp=8), "local_batch": 4, "microbatches": 4}, "pipeline ranks wait"),
        ({"mesh": Mesh(pp=8), "local_batch": 4, "microbatches": 4}, "is a lower bound"),
        ({"local_batch": 1, "seq_len": 2048}, "2048 tokens a forward do not fill"),
        ({"ac": "full", "local_batch": 1}, "ac=none fits too"),
        ({"compiled": False}, "compile=none"),
        ({"mesh": Mesh(dp_shard=8, tp=8), "local_batch": 1}, "waits for tp transfers"),
    ],
)
def test_remarks(job, changed: dict, words: str) -> None:
    if "shape" in changed:
        changed = changed | {"shape": replace(job().shape, num_kv_heads=16)}
    assert any(words in text for text in remarks_on(plan_job(job(**changed))))


def test_async_tp_is_not_advised_where_it_is_on(job) -> None:
    planned = plan_job(job(mesh=Mesh(dp_shard=8, tp=8), local_batch=1, async_tp=("all_gather", "reduce_scatter")))
    remarks = " ".join(remarks_on(planned))
    assert "waits for tp transfers" in remarks and "async_tp" not in remarks


def test_a_good_plan_has_no_remarks(job) -> None:
    assert remarks_on(plan_job(job("h200", mesh=Mesh(dp_shard=32), ac="none"))) == []


@pytest.mark.parametrize(
    ("option", "changed", "width", "words"),
    [
        ("h100_500w", {}, 0.10, "bfloat16 runs of dense models"),
        ("h200", {"mesh": Mesh(dp_shard=4, tp=2)}, 0.15, "tensor parallelism"),
        ("h200", {"mesh": Mesh(dp_shard=4, pp=2), "quant": "float8_rowwise", "microbatches": 2}, 0.15, "pipelines are"),
        ("h200", {"mesh": Mesh(dp_shard=4, pp=2), "quant": "float8_rowwise", "microbatches": 2}, 0.15, "float8 is"),
        ("h200", {"mesh": Mesh(dp_replicate=2, dp_shard=8)}, 0.15, "HSDP"),
        ("h200", {"quant": "float8_rowwise", "own_float8": True}, 0.15, "measured on one GPU alone"),
        ("h200", {"quant": "float8_rowwise_with_gw_hp"}, 0.20, "recipe was never measured"),
        (
            "h200",
            {"mesh": Mesh(pp=2), "microbatches": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2},
            0.20,
            "schedule was never measured",
        ),
        ("h200", {"seq_len": 65536}, 0.20, "long sequences"),
        ("b200", {}, 0.25, "the rates of b200 are shares of its datasheet: nothing was measured on one"),
        ("h100_pcie", {}, 0.25, "the links of pcie_200g are shares"),
        ("h200", {"local_batch": 1, "seq_len": 2048}, 0.30, "few tokens"),
        ("h200", {"mesh": Mesh(dp_shard=1024)}, 0.20, "no published run has more than 512"),
        ("h200", {"mesh": Mesh(dp_shard=8192)}, 0.30, "more than 4096 devices"),
        ("h200", {"ac": "memory_budget", "ac_budget": 0.5}, 0.25, "a budget below 0.7"),
    ],
)
def test_range_has_reasons(job, option: str, changed: dict, width: float, words: str) -> None:
    planned_range = relative_range(job(option, **changed))
    assert planned_range[0] == width
    assert words in planned_range[1]


def test_calibrated_rates_have_their_own_range(job) -> None:
    h200 = job("h200")
    width, why = relative_range(replace(h200, device=replace(h200.device, basis="calibrated")))
    assert width == 0.25 and "103 are planned within 25 %" in why


def test_small_budget_recomputes_gemms(job) -> None:
    """From no recomputation to all of it, the less is kept the slower."""
    budgets = [plan_job(job(ac="memory_budget", ac_budget=share)).tps for share in (0.8, 0.6, 0.4, 0.0)]
    full = plan_job(job(ac="full")).tps
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 1.1 * budgets[-1] and budgets[-1] == pytest.approx(full, rel=0.02)


def test_token_budget(job) -> None:
    planned = plan_job(job())
    spent = planned.budget(planned.tps * 8 * 3600, power_w=500, price_per_hour=2.0)
    assert spent["gpu_hours"] == pytest.approx(8)
    assert spent["days"] == pytest.approx(1 / 24)
    assert spent["cost"] == pytest.approx(16)
    assert spent["energy_mwh"] == pytest.approx(8 * 500 / 1e6)
    assert planned.budget(1.0, power_w=None, price_per_hour=None)["cost"] is None


def test_events_of_a_stream_do_not_overlap(job) -> None:
    events = [event for event in render.timeline(step.plan_step(job()))["traceEvents"] if event["ph"] == "X"]
    for stream in (1, 2):
        on_stream = sorted((event for event in events if event["tid"] == stream), key=lambda event: event["ts"])
        assert len(on_stream) > 60
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(on_stream, on_stream[1:], strict=False))


def test_float8_needs_a_rate(job) -> None:
    with pytest.raises(ConfigError, match="a100_80gb has no rate for float8"):
        step.plan_step(job("a100_80gb", quant="float8_rowwise"))


def test_device_without_rates_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not say gemm_bf16_tflops"):
        devices.device(schema.Hardware(name="mine", peak_bf16_tflops=1.0, memory_gib=1.0))
    with pytest.raises(ConfigError, match="how fast its links are"):
        devices.network(schema.Cluster(), world_size=2)


def test_configuration_becomes_a_job(configure) -> None:
    planned = from_config.job(
        configure(
            "model=llama3_70b",
            "parallel=hsdp2x4_tp8",
            "train.local_batch=2",
            "ac=full",
            "train.global_batch=64",
            "compile.async_tp=true",
            "cluster.rdma_gb_s=20",
        )
    )
    assert planned.mesh == Mesh(dp_replicate=2, dp_shard=4, tp=8)
    assert (planned.accumulation, planned.local_batch, planned.seq_len, planned.ac) == (4, 2, 8192, "full")
    assert planned.async_tp == ("all_gather", "reduce_scatter")
    assert (planned.device.name, planned.network.name, planned.network.rdma_gb_s) == ("h200", "hgx_400g", 20.0)


def test_pipeline_is_split_as_it_is_run(configure) -> None:
    interleaved = from_config.job(
        configure(
            "model=llama3_70b",
            "parallel=fsdp8_pp4",
            "train.global_batch=64",
            "train.local_batch=1",
            "parallel.pp_schedule=Interleaved1F1B",
        )
    )
    assert (interleaved.local_batch, interleaved.microbatches, interleaved.accumulation) == (8, 8, 1)
    assert interleaved.stages_per_rank == 2
    assert interleaved.tokens_per_step == 64 * 8192 and interleaved.tokens == 8192
    assert sum(interleaved.layers_of_ranks) == 80
    v_schedule = from_config.job(configure("model=llama3_70b", "parallel=pp4", "parallel.pp_schedule=ZBVZeroBubble"))
    first, last = v_schedule.stages_of(0)
    assert first.first and last.last, "a V ends where it began"


def test_schedule_from_a_file_is_simulated(configure, tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")
    planned = from_config.job(configure("model=llama3_8b", "parallel=pp2", f"parallel.pp_schedule_csv={path}"))
    assert planned.microbatches == 2
    assert planned.bubble == pytest.approx(1.0), "nine units for two microbatches of three"


@pytest.mark.parametrize(
    ("typed", "loss", "chunk"),
    [
        ("parallel=fsdp2", "fused", 4096),
        ("parallel=tp2", "fused", 4096),
        ("kernels=torch", "chunked", 1024),
        ("loss.chunk_tokens=512", "fused", 512),
    ],
)
def test_loss_is_the_one_that_will_run(configure, typed: str, loss: str, chunk: int) -> None:
    planned = from_config.job(configure(typed))
    assert (planned.software.loss, planned.chunk_tokens) == (loss, chunk)


def test_float8_recipe_and_gather_are_planned(configure) -> None:
    planned = from_config.job(
        configure("parallel=fsdp8", "quant=float8_tensorwise", "quant.fsdp_float8_all_gather=true")
    )
    assert (planned.quant, planned.float8_gather) == ("float8_tensorwise", True)


def test_run_is_compared_with_its_plan(configure) -> None:
    env = Env(0, 1, 0, torch.device("cuda"), "nccl")
    record = {"step": 20, "tps": 1000.0, "step_s": 1.0, "mem_reserved_gib": 2.0}
    config = configure("parallel=single", "train.local_batch=2")
    comparison = run_report.compare_with_plan(config, env, record)
    planned = plan_job(from_config.job(config))
    assert comparison["error"]["tps"] == pytest.approx(planned.tps / 1000 - 1)
    assert comparison["measured"] == {"tps": 1000.0, "step_s": 1.0, "memory_gib": 2.0}
    assert run_report.compare_with_plan(config, Env(0, 1, 0, torch.device("cpu"), "gloo"), record) is None
    config.hardware = schema.Hardware(name="mine")
    assert run_report.compare_with_plan(config, env, record) is None, "a device without rates"


def test_typed_cluster_wins_over_that_of_the_device(configure) -> None:
    assert configure("cluster=ethernet_100g").cluster.name == "ethernet_100g"


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704), ("llama4_17bx128e", 400_711_848_960, 17_184_691_200)],
)
def test_mixture_has_its_parameters(configure, model: str, total: int, active: int) -> None:
    planned = from_config.job(configure(f"model={model}"))
    assert (planned.shape.num_params, planned.shape.num_active_params) == (total, active)
    assert planned.params_of(planned.stages_of(0)) == (total, total), "one rank has all"


def test_experts_are_spread_over_ep_ranks(configure) -> None:
    spread = from_config.job(configure("model=qwen3_30b_a3b", "parallel=fsdp64_ep8"))
    unspread = replace(spread, mesh=replace(spread.mesh, ep=1))
    assert spread.params_of(spread.stages_of(0))[1] == pytest.approx(unspread.params_of(unspread.stages_of(0))[1])
    assert (
        memory.plan_memory(spread).parts["gathered weights"]
        < 0.5 * memory.plan_memory(unspread).parts["gathered weights"]
    )
    comm = {(row["axis"], row["op"]): row for row in plan_job(spread).communication()}
    assert comm["ep", "all_to_all"]["bytes"] > 0 and comm["ep", "all_to_all"]["exposed_s"] > 0
    assert relative_range(spread)[0] == 0.30


def test_grouped_gemms_of_few_rows_are_slow(job) -> None:
    single, grouped = (primitives.Gemm("x", 8192, 4096, 4096, groups=groups) for groups in (1, 64))
    assert single.flops == grouped.flops
    assert cost.gemm_seconds(job(), grouped) > 1.4 * cost.gemm_seconds(job(), single)


def test_all_to_all_over_hosts_is_slow(job) -> None:
    def seconds(ranks: int) -> float:
        planned = job(mesh=Mesh(dp_shard=ranks, ep=ranks))
        return cost.collective_seconds(planned, primitives.Collective("ep", "all_to_all", 1e9))

    assert seconds(8) == pytest.approx(1e9 * 7 / 8 / 270e9, rel=0.05)
    assert seconds(16) == pytest.approx(1e9 * (7 / 16 / 270e9 + 8 / 16 / 40e9), rel=0.05)


def test_chunked_attention_has_fewer_flops(configure) -> None:
    long = from_config.job(configure("model=llama4_17bx16e", "parallel=fsdp16", "train.seq_len=32768"))
    flops = {}
    for block in long.shape.blocks:
        kernels = [op for op in operators.block_forward(long, block) if isinstance(op, primitives.AttentionKernel)]
        flops[block.rotary] = sum(kernel.flops for kernel in kernels)
    assert flops[False] == pytest.approx(4 * flops[True])
