"""The work that ``hosts.py`` measures, in the order of importance; sizes of the model are Llama 3 3B, untied."""

from __future__ import annotations

from dataclasses import dataclass, field

MODEL = ["model=llama3_3b", "model.tie_embeddings=false", "tokenizer=bytes"]
#: A model that trains within milliseconds on any machine.
SMALL = [
    "model=llama3_debug",
    "model.dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.num_layers=4",
    "model.ffn_dim=64",
    "model.vocab_size=288",
    "train.seq_len=64",
]
#: In place of ``MODEL`` and of the rows' batch.
DEBUG = [
    *SMALL,
    "tokenizer=bytes",
    "compile=none",
    "ac=none",
    "ac.keep_products=0.5",
    "train.local_batch=2",
    "train.global_batch=null",
    "parallel.fsdp_reuse_memory=false",
    "optim.master=float32",
]
SKIPPED, MEASURED, PROFILED = 4, 8, 2


@dataclass(frozen=True)
class Work:
    """One measured configuration.

    Args:
        ours: overrides. peer: torchtitan's options; None: it has no such work, or does it in float32 (tp and pp without
            FSDP). ranks: GPUs that it takes. expected_s: seconds of our side, start and compilation included. compiled:
            works in compiled graphs or on a GPU alone. variables: of the environment, for our side.
    """

    ours: list[str]
    ranks: int
    peer: list[str] | None = None
    expected_s: int = 50
    compiled: bool = False
    steps: tuple[int, int] = field(default=(SKIPPED, MEASURED))
    variables: dict[str, str] = field(default_factory=dict)


_SELECTIVE = ["ac=selective_op"]
#: All but norms and products of gates, with gradients in memory of activations: as much as selective_op without.
_KEPT = ["ac=memory_budget", "ac.budget=0.8"]
_REUSE = ["parallel.fsdp_reuse_memory=true"]
_PEER = [
    "--model.flavor=3B",
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
]
_FLOAT8_PEER = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns=output"]
_GATHER_PEER = [
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
]
_OWN = ["quant.product=own", "quant.fast_accum=true"]
_ASYNC = ["compile=block", "compile.async_tp=true"]


def rows(ranks: int) -> dict[str, Work]:
    """Rows of a host with so many GPUs, at least 2."""
    works = _context(2) | _tensor(2) | _data(ranks) | _long(2) | _pipeline()
    if ranks > 2:
        works |= _tensor(ranks) | _two_axes(ranks)
    return works


def _sizes(batch: int, length: int) -> tuple[list[str], list[str]]:
    return (
        [f"train.local_batch={batch}", f"train.seq_len={length}"],
        [f"--training.local_batch_size={batch}", f"--training.seq_len={length}"],
    )


def _context(ranks: int) -> dict[str, Work]:
    """2 x 16,384 tokens; and with what a GPU's memory allows beyond the peer's recomputation."""
    sizes, peer = _sizes(2, 16384)
    base = [*sizes, f"parallel=cp{ranks}"]
    peer_args = [
        *_PEER,
        *peer,
        f"--parallelism.context_parallel_degree={ranks}",
        "--parallelism.data_parallel_shard_degree=1",
    ]
    works = {
        f"cp{ranks}-{method}": Work(
            [*base, *_SELECTIVE, f"parallel.cp_method={method}"],
            ranks,
            peer_args if method == "allgather" else None,
            55,
        )
        for method in ("allgather", "ulysses", "ring")
    }
    works[f"cp{ranks}-allgather-more"] = Work([*base, *_SELECTIVE, "ac.keep_products=0.8"], ranks, peer_args, 55)
    works[f"cp{ranks}-allgather-reuse"] = Work([*base, *_KEPT, *_REUSE, "loss.chunk_tokens=1536"], ranks, peer_args, 55)
    works[f"cp{ranks}-allgather-keep"] = Work([*base, *_SELECTIVE, "parallel.fsdp_reshard_after_forward=never"], ranks)
    works[f"cp{ranks}-allgather-none"] = Work([*base, "ac=none"], ranks)
    return works


def _long(ranks: int) -> dict[str, Work]:
    sizes, _ = _sizes(1, 65536)
    return {
        f"cp{ranks}-64k-{method}": Work(
            [*sizes, f"parallel=cp{ranks}", *_SELECTIVE, f"parallel.cp_method={method}"],
            ranks,
            expected_s=100,
            steps=(3, 4),
        )
        for method in ("allgather", "ulysses", "ring")
    }


def _tensor(ranks: int) -> dict[str, Work]:
    sizes, _ = _sizes(8, 4096)
    base, name = [*sizes, f"parallel=tp{ranks}", *_SELECTIVE], f"tp{ranks}"
    works = {name: Work(base, ranks)}
    for kind, ops in (("auto", "[auto]"), ("all", "[all_gather,reduce_scatter]"), ("gathers", "[all_gather]")):
        works[f"{name}-async-{kind}"] = Work([*base, *_ASYNC, f"compile.async_tp_ops={ops}"], ranks, compiled=True)
    base_kept = [*sizes, f"parallel=tp{ranks}", *_KEPT]
    works[f"{name}-kept"] = Work(base_kept, ranks)
    works[f"{name}-kept-async-auto"] = Work([*base_kept, *_ASYNC, "compile.async_tp_ops=[auto]"], ranks, compiled=True)
    for recipe in ("tensorwise", "rowwise"):
        quant = [f"quant=float8_{recipe}", *_OWN]
        works[f"{name}-{recipe}"] = Work([*base, *quant], ranks)
        for kind, ops in (("auto", "[auto]"), ("scatters", "[reduce_scatter]")):  # its gathers stand before casts
            works[f"{name}-{recipe}-async-{kind}"] = Work(
                [*base, *quant, *_ASYNC, f"compile.async_tp_ops={ops}"], ranks, compiled=True
            )
    return works


def _data(ranks: int) -> dict[str, Work]:
    sizes, peer = _sizes(4, 4096)
    base, name = [*sizes, f"parallel=fsdp{ranks}", *_SELECTIVE], f"fsdp{ranks}"
    peer_args = [*_PEER, *peer, f"--parallelism.data_parallel_shard_degree={ranks}"]
    works = {name: Work(base, ranks, peer_args)}
    works[f"{name}-split"] = Work([*base, "ac.keep_products=0.75", "optim.master=split"], ranks, peer_args)
    reuse = [*sizes, f"parallel=fsdp{ranks}", *_KEPT, *_REUSE, "loss.chunk_tokens=1536"]
    works[f"{name}-reuse"] = Work(reuse, ranks, peer_args)
    for blocks in ("4", "8", "16"):  # multiprocessors that a transfer takes at most
        works[f"{name}-reuse-ctas{blocks}"] = Work(reuse, ranks, variables={"NCCL_MAX_CTAS": blocks})
    for recipe in ("tensorwise", "rowwise"):
        quant = [f"quant=float8_{recipe}"]
        works[f"{name}-{recipe}-own"] = Work([*base, *quant, *_OWN], ranks)
        works[f"{name}-{recipe}"] = Work(
            [*base, *quant],
            ranks,
            [*peer_args, *_FLOAT8_PEER, f"--quantize.linear.float8.recipe_name={recipe}"]
            if recipe == "rowwise"
            else None,
        )
    for suffix, own in (("gather", []), ("own-gather", _OWN)):
        works[f"{name}-tensorwise-{suffix}"] = Work(
            [
                *base,
                "quant=float8_tensorwise",
                *own,
                "quant.fsdp_float8_all_gather=true",
                "quant.precompute_scale=true",
            ],
            ranks,
            [*peer_args, *_FLOAT8_PEER, *_GATHER_PEER],
        )
    works[f"{name}-tensorwise-own-gather-reuse"] = Work(
        [*works[f"{name}-tensorwise-own-gather"].ours, "ac.keep_products=0.85", *_REUSE],
        ranks,
        works[f"{name}-tensorwise-own-gather"].peer,
    )
    return works


def _pipeline() -> dict[str, Work]:
    """8 microbatches of 2 x 4096 tokens."""
    base = ["train.local_batch=2", "train.seq_len=4096", "train.global_batch=16", "parallel=pp2"]
    split = ["compile=none", "ac=none"]  # a backward in two parts takes neither compiled blocks nor recomputation
    return {
        "pp2-1f1b": Work([*base, *_SELECTIVE, "parallel.pp_schedule=1F1B"], 2, expected_s=60),
        "pp2-interleaved": Work([*base, *_SELECTIVE, "parallel.pp_schedule=Interleaved1F1B"], 2, expected_s=60),
        "pp2-zbv": Work([*base, *split, "parallel.pp_schedule=ZBVZeroBubble"], 2, expected_s=60),
    }


def _two_axes(ranks: int) -> dict[str, Work]:
    half, (sizes, peer) = ranks // 2, _sizes(4, 4096)
    long, long_peer = _sizes(2, 16384)
    shard = f"--parallelism.data_parallel_shard_degree={half}"
    return {
        f"fsdp{half}_tp2": Work(
            [*sizes, f"parallel=fsdp{half}_tp2", *_SELECTIVE],
            ranks,
            [*_PEER, *peer, shard, "--parallelism.tensor_parallel_degree=2"],
        ),
        f"fsdp{half}_tp2-async-auto": Work(
            [*sizes, f"parallel=fsdp{half}_tp2", *_SELECTIVE, *_ASYNC, "compile.async_tp_ops=[auto]"],
            ranks,
            compiled=True,
        ),
        f"fsdp{half}_cp2": Work(
            [*long, f"parallel=fsdp{half}_cp2", *_SELECTIVE],
            ranks,
            [*_PEER, *long_peer, shard, "--parallelism.context_parallel_degree=2"],
        ),
        f"hsdp2x{half}": Work(
            [*sizes, f"parallel=hsdp2x{half}", *_SELECTIVE],
            ranks,
            [*_PEER, *peer, shard, "--parallelism.data_parallel_replicate_degree=2"],
        ),
        f"fsdp{half}_pp2": Work(
            [
                "train.local_batch=2",
                "train.seq_len=4096",
                f"train.global_batch={16 * half}",
                f"parallel=fsdp{half}_pp2",
                *_SELECTIVE,
            ],
            ranks,
        ),
    }
