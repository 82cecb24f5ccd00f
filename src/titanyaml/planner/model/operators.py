"""The exact accounting: which products, attentions, passes over memory and collectives one block and the ends do.

Per rank, with local shapes. A block is listed once; who multiplies it by the number of layers is ``step.py``. Nothing
here is fitted, with the exception of how many bytes a pass moves, which is written beside it. ``runner/tracing.py``
runs the real pipeline on fake tensors and must find the same products and collectives. What routers and experts add
is in ``experts.py``.

T tokens of the rank, d width, q and k features of query and key heads, f inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind, LinearShape
from titanyaml.planner.model import constants, experts
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.primitives import Attention, Collective, Gemm, Operator, Pass, width


def float8(job: Job) -> bool:
    """Whether the blocks' linear layers multiply in 8 bits."""
    return job.quant != "none"


#: Of our own casts, by granularity of the scales: a matrix is read and written in both layouts (4 bytes an element) and
#: read for its maxima: for rows and columns always, for the whole where no kernel in front finds them (about half).
#: At 0.70 of a copy's rate on an H200 (``benchmarks/results``: 46 and 38 ms of a step of 3B).
OWN_CAST = {"rowwise": 6 / 0.70, "tensorwise": 5 / 0.70}


#: The least share that the compiler keeps by repeating norms and product alone (3B on an H200, 0.8 and 0.5 tried).
CHEAP_BUDGET = 0.7


def cast_bytes(job: Job) -> float:
    """Bytes that a cast of both layouts moves for an element."""
    tensorwise = job.quant == "float8_tensorwise"
    if job.own_float8:
        return OWN_CAST["tensorwise" if tensorwise else "rowwise"]
    fitted = constants.CAST_TENSORWISE if tensorwise else constants.CAST_ROWWISE
    return job.device.cast_bytes[not tensorwise] or fitted.value


def local(job: Job, one: LinearShape) -> tuple[int, int]:
    """(inputs, outputs) on this rank."""
    tp = job.mesh.tp
    return (one.inputs, one.outputs // tp) if one.column else (one.inputs // tp, one.outputs)


def _products(job: Job, linears: Iterable[LinearShape]) -> list[Operator]:
    dtype = "fp8" if float8(job) else width(job)
    return [
        Gemm(one.name, job.tokens, outputs, inputs, dtype) for one in linears for inputs, outputs in [local(job, one)]
    ]


def _casts(job: Job, linears: Iterable[LinearShape]) -> list[Operator]:
    """Inputs of a forward, once for matrices that read the same, and the weights."""
    if not float8(job):
        return []
    elements, seen = 0, set()
    for one in linears:
        inputs, outputs = local(job, one)
        elements += inputs * outputs
        if one.reads not in seen:
            seen.add(one.reads)
            elements += inputs * (_gathered_tokens(job) if one.column else job.tokens)
    return [Pass("cast", "casts", elements * cast_bytes(job))]


def _gathered_tokens(job: Job) -> int:
    """Tokens that a rank casts of a tensor that the tp ranks gather: its slice where float8 is what travels."""
    return job.slice_tokens if _travels_in_float8(job) else job.tokens


def _travels_in_float8(job: Job) -> bool:
    return job.quant == "float8_tensorwise" and job.software.gathers_float8


def _tp(job: Job, op: str, *, float8: bool = False, name: str = "") -> list[Operator]:
    """One transfer of the residual stream between tp ranks; without sequence parallelism an all-reduce."""
    if job.mesh.tp == 1:
        return []
    whole = job.tokens * job.shape.dim
    if not job.sequence_parallel:
        return [Collective("tp", "all_reduce", whole * job.compute_bytes, name)]
    size = whole * (1 if float8 else job.compute_bytes)
    moves = job.software.copies_sequence and job.local_batch > job.microbatches
    return [Collective("tp", op, size, name), *[Pass("sequence layout", "copies", 2.0 * size)] * moves]


def _attention(job: Job, block: BlockKind, *, backward: bool) -> Attention:
    mesh, shape = job.mesh, job.shape
    batch, length = job.local_batch // job.microbatches, job.seq_len
    if block.chunk is not None and block.chunk < length:
        batch, length = batch * length / block.chunk, block.chunk
    return Attention(batch, shape.num_heads // mesh.tp, shape.head_dim, length, 1 / mesh.cp, backward)


def _context(job: Job, *, backward: bool) -> list[Operator]:
    """Transfers of cp: keys and values gathered, once more in the backward pass, and their gradients exchanged."""
    mesh, shape, b = job.mesh, job.shape, job.compute_bytes
    if mesh.cp == 1:
        return []
    keys = 2 * job.tokens * (shape.kv_dim // mesh.tp)
    if job.cp_method == "ulysses":
        out = job.tokens * (shape.query_dim // mesh.tp)
        return [Collective("cp", "all_to_all", (keys + out) * b), Collective("cp", "all_to_all", out * b)]
    if job.cp_method == "ring":  # as the bytes of a gather; gradients in fp32 where several ranks add to them
        rounds, width = mesh.cp - 1, b if mesh.cp == 2 else max(b, 4)
        sent = [Collective("cp", "all_to_all", keys * b)] * rounds
        return sent + [Collective("cp", "all_to_all", keys * width)] * (rounds if backward else 0)
    sent = [Collective("cp", "all_gather", keys * b * mesh.cp, "keys and values")]
    return sent + [Collective("cp", "all_to_all", keys * b * (mesh.cp - 1))] * backward


def _forward_passes(job: Job, block: BlockKind) -> list[Operator]:
    """Norms, rotation, activation and residual additions of a forward.

    Compiled, in elements a token: norm 2d, rotation 2(q + k), addition and norm 4d, product 3f (ungated 2f), addition
    3d. Eager kernels pass more often (``_eager``).
    """
    d, heads, f = _widths(job, block)
    moved = 9 * d * job.stream_bytes + job.compute_bytes * (2 * heads + (3 if job.shape.gated else 2) * f)
    moved += _eager(job, block, norm=30, rotation=24, product=4)
    return [Pass("norms, rotation, activation", "elementwise", moved)]


def _backward_passes(job: Job, block: BlockKind) -> list[Operator]:
    """Compiled, in elements a token: two norms 8d, sums of the products' input gradients 7d, rotation 2(q + k),
    product 6f (ungated 3f)."""
    d, heads, f = _widths(job, block)
    moved = (8 * d + 7 * job.tokens * job.shape.dim) * job.stream_bytes
    moved += job.compute_bytes * (2 * heads + (6 if job.shape.gated else 3) * f)
    moved += _eager(job, block, norm=45, rotation=30, product=6)
    return [Pass("gradients of norms, rotation, activation", "elementwise", moved)]


def _widths(job: Job, block: BlockKind) -> tuple[int, int, int]:
    """Elements of the stream between split matrices, of queries and keys (where they are turned), of the product."""
    shape, tp = job.shape, job.mesh.tp
    heads = job.tokens * (shape.query_dim + shape.kv_dim) // tp if block.rotary else 0
    return job.slice_tokens * shape.dim, heads, job.tokens * shape.width(block) // tp


def _eager(job: Job, block: BlockKind, *, norm: float, rotation: float, product: float) -> float:
    """Bytes that eager kernels move beyond compiled ones, given bytes an element: a norm in float32 piece by piece
    (where it is not one kernel), rotation in float32, gate and product in two kernels."""
    if job.compiled:
        return 0.0
    d, heads, f = _widths(job, block)
    norms = 0.0 if job.software.fused_norms else 2 * norm * d
    return norms + rotation * heads + product * f * job.shape.gated


def block_forward(job: Job, block: BlockKind) -> list[Operator]:
    """One block, forward."""
    gather = _tp(job, "all_gather", float8=_travels_in_float8(job)) if job.sequence_parallel else []
    scatter, linears = _tp(job, "reduce_scatter"), job.shape.linears_of(block)
    mixed = experts.forward(job) if block.mixture else []
    feeds = job.shape.width(block) > 0
    return [
        *gather,
        *_products(job, linears),
        *_casts(job, linears),
        _attention(job, block, backward=False),
        *_context(job, backward=False),
        *scatter,
        *mixed,
        *[*gather, *scatter] * feeds,
        *_forward_passes(job, block),
    ]


def redone(job: Job, block: BlockKind, keeps: int = kept_matmuls.HALF) -> tuple[str, ...]:
    """The products that recomputation does again, by name. The last one of a feed-forward is not: no gradient needs its
    output. keeps: of products, under ``selective_op``."""
    shape = job.shape
    names = [one.name for one in shape.attention_linears]
    names += [one.name for one in experts.products(job)] if block.mixture else []
    feeds = [one.name for one in shape.ffn_linears(shape.width(block))]
    names += feeds
    if job.ac == "memory_budget":
        return _cheapest(job, block)
    if job.ac == "selective_op" and keeps == kept_matmuls.ALL:
        names = []
    elif job.ac == "selective_op" and keeps == kept_matmuls.HALF:
        names = names[0::2] if job.software.keeps_even else names[1::2]
    elif job.ac not in ("full", "selective_layer", "selective_op"):
        names = []
    return tuple(name for name in names if not feeds or name != feeds[-1])


def _cheapest(job: Job, block: BlockKind) -> tuple[str, ...]:
    """What a budget repeats beside cheap passes: products in the order of what they cost for a byte, attention last.

    As ``memory.saved_per_token`` keeps the square of a small budget, this repeats what makes up for the rest. Where
    cheap passes alone free too little for a large budget, attention is repeated: so do torch's partitioner on the
    graphs of 3B, 8B and 70B under tp of 2, 4 and 8, and 3B on two H200 (56 forward attentions a step of 28 blocks).
    """
    if job.ac_budget >= CHEAP_BUDGET:
        return ("attention",) * repeats_attention(job, block)
    shape = job.shape
    d, q, k, f = shape.dim, shape.query_dim, shape.kv_dim, shape.width(block)
    sizes = {"w1": f * shape.gated, "w3": f, "wv": k, "wk": k, "wq": q, "wo": d, "attention": q}
    if block.mixture:
        each = shape.mixture.top_k * shape.mixture.ffn_dim
        sizes = {"experts.w1": each, "experts.w3": each} | sizes
        f += each
    kept = job.ac_budget**2 * (3 * d + 2 * q + 2 * k + (3 if shape.gated else 2) * f)  # of all that a block saves
    spare, names = sum(sizes.values()) - kept, []
    for name, size in sizes.items():
        if spare > 0 and size:
            names.append(name)
            spare -= size
    return tuple(names)


def keeps_norms(job: Job) -> bool:
    """Whether norms are kept under a budget: tp ranks gather them, and no transfer is repeated."""
    return job.mesh.tp > 1 and job.sequence_parallel


def repeats_attention(job: Job, block: BlockKind) -> bool:
    """Whether the product of gate and up alone frees less than a large budget asks for, where norms are kept.

    Saved without a budget, in elements of a token: the block's input and what attention adds to it, queries, keys,
    values and attention's output, gate, up and product; and both gathered streams.
    """
    if not keeps_norms(job) or float8(job) or block.mixture:
        return False
    shape, tp = job.shape, job.mesh.tp
    f = shape.width(block)
    saved = (2 * shape.dim + 2 * shape.query_dim + 2 * shape.kv_dim + (3 if shape.gated else 2) * f) / tp
    return f / tp < (1 - job.ac_budget) * (saved + 2 * shape.dim)


def block_recompute(job: Job, block: BlockKind, keeps: int = kept_matmuls.HALF) -> list[Operator]:
    """What the backward pass of one recomputed block does again. keeps: of products, under ``selective_op``.

    ``full`` repeats attention; ``selective_op`` keeps it, and casts again what kept products read in float8: counted as
    where half of them are kept. ``memory_budget`` is a compiler's choice: taken as the cheap passes, attention where
    they free too little, and below ``CHEAP_BUDGET`` what costs least for a byte. It never repeats a transfer.
    """
    if job.ac == "none":
        return []
    again = redone(job, block, keeps)
    linears = tuple(one for one in job.shape.linears_of(block) if one.name in again)
    if job.ac == "memory_budget":  # within kernels of the backward pass, which write what was not kept
        d, _, f = _widths(job, block)
        norms = 0.0 if keeps_norms(job) else 2.0 * d
        passes = [Pass("norms and product again", "elementwise", job.compute_bytes * (norms + f))]
        mixed = [one for one in experts.products(job) if one.name in again] if block.mixture else []
        attention = [_attention(job, block, backward=False)] * ("attention" in again)
        return [*passes, *_products(job, linears), *_casts(job, linears), *mixed, *attention]
    read = linears or [one for one in job.shape.linears_of(block) if one.name in redone(job, block)]
    full = job.ac != "selective_op"
    gather = _tp(job, "all_gather", float8=_travels_in_float8(job)) if job.sequence_parallel else []
    scatter = [] if not full and job.software.keeps_scattered else _tp(job, "reduce_scatter")
    attention = [_attention(job, block, backward=False), *_context(job, backward=False)] if full else []
    mixed = (
        [one for one in experts.forward(job) if not isinstance(one, Gemm) or one.name in again] if block.mixture else []
    )
    return [
        *gather,
        *_products(job, linears),
        *_casts(job, read),
        *attention,
        *scatter,
        *mixed,
        *gather * (job.shape.width(block) > 0),
        *_forward_passes(job, block),
    ]


def block_backward(job: Job, block: BlockKind) -> list[Operator]:
    """One block, backward, without what is recomputed."""
    operators: list[Operator] = []
    gather, scatter = _tp(job, "all_gather"), _tp(job, "reduce_scatter")
    dtype, plain = ("fp8" if float8(job) else width(job)), width(job)
    weight_dtype = plain if job.quant == "float8_rowwise_with_gw_hp" else dtype
    elements = 0
    for one in job.shape.linears_of(block):
        inputs, outputs = local(job, one)
        operators += [
            Gemm(f"{one.name}.dx", job.tokens, inputs, outputs, dtype),
            Gemm(f"{one.name}.dw", outputs, inputs, job.tokens, weight_dtype),
        ]
        elements += outputs * (job.tokens if one.column else _gathered_tokens(job))
    if float8(job):
        operators.append(Pass("cast of gradients", "casts", elements * cast_bytes(job)))
    entries = 1 + (job.shape.width(block) > 0)
    if job.sequence_parallel:
        operators += [*gather, *scatter] * entries
    else:
        operators += scatter * entries  # all-reduces
    if job.mesh.tp > 1:
        # gradients of norms that see a part of the tokens, or of the heads
        norms = [job.shape.dim] * 2 * job.sequence_parallel + [job.shape.head_dim] * 2 * job.shape.head_norms
        operators += [Collective("tp", "all_reduce", size * max(job.compute_bytes, 4), "norm") for size in norms]
    operators += experts.backward(job) if block.mixture else []
    return [
        *operators,
        _attention(job, block, backward=True),
        *_context(job, backward=True),
        *_backward_passes(job, block),
    ]


def embedding_forward(job: Job) -> list[Operator]:
    """The lookup: one write of the stream."""
    moved = 2 * job.tokens * job.shape.dim * job.compute_bytes
    return [Pass("embedding", "elementwise", moved), *_tp(job, "reduce_scatter", name="embedding")]


def embedding_backward(job: Job) -> list[Operator]:
    """The scatter of the stream's gradient into a table of fp32 or compute dtype."""
    shape, b = job.shape, job.compute_bytes
    moved = job.tokens * shape.dim * b * 3 + shape.vocab_size * shape.dim * b / job.mesh.tp
    gather = _tp(job, "all_gather", name="embedding") if job.sequence_parallel else []
    return [Pass("embedding", "elementwise", moved), *gather]


#: Bytes that the loss moves for a logit beside its three products: (forward, backward).
LOSS_TRAFFIC = {"chunked": (14.0, 8.0), "fused": (6.0, 0.0), "compiled": (8.0, 4.0), "plain": (26.0, 18.0)}


def head(job: Job) -> list[Operator]:
    """Final norm, head and loss, forward and backward together: a chunk's gradient is formed at once.

    A chunked loss adds every chunk's product into a float32 [V, d]: one read and one write of it.
    """
    shape, tp, tokens = job.shape, job.mesh.tp, job.tokens
    rows, dtype = shape.vocab_size // tp, width(job)
    chunks = -(-tokens // job.chunk_tokens) if job.software.in_chunks else 0
    logits = sum(LOSS_TRAFFIC[job.software.loss]) * tokens * rows
    operators: list[Operator] = [
        Gemm("head", tokens, rows, shape.dim, dtype),
        Gemm("head.dx", tokens, shape.dim, rows, dtype),
        Gemm("head.dw", rows, shape.dim, tokens, dtype),
        Pass("loss", "loss", logits + 8.0 * chunks * rows * shape.dim),
        Pass("final norm", "elementwise", 10 * job.slice_tokens * shape.dim * job.compute_bytes),
    ]
    if tp == 1:
        return operators
    if job.sequence_parallel:
        norm = [Collective("tp", "all_reduce", shape.dim * max(job.compute_bytes, 4), "norm")]
        operators += [*_tp(job, "all_gather"), *_tp(job, "reduce_scatter"), *norm]
    else:
        operators += _tp(job, "all_reduce")
    return operators


def shard_gather(job: Job, params: float, *, axis: str = "shard", block: bool) -> Collective:
    """FSDP's gather of the weights of a block or of the model's ends. params: of a tp rank."""
    narrow = block and job.float8_gather and axis == "shard"
    return Collective(axis, "all_gather", params * (1 if narrow else job.compute_bytes))


def shard_reduce(job: Job, params: float, *, axis: str = "shard") -> Collective:
    """FSDP's sum of gradients, in float32."""
    return Collective(axis, "reduce_scatter", params * max(job.compute_bytes, 4))


def replica_reduce(job: Job, params: float, *, axis: str = "shard") -> Collective:
    """The sum of a shard's gradient over the copies of the model."""
    return Collective("dp_replicate", "all_reduce", params / job.mesh.size(axis) * max(job.compute_bytes, 4))


def stream(job: Job) -> Collective:
    """The residual stream, or its gradient, from one pipeline rank to the next."""
    return Collective("pp", "send", job.slice_tokens * job.shape.dim * job.compute_bytes)


def flops(operators: Iterable[Operator]) -> int:
    """Of the matrix products."""
    return sum(one.flops for one in operators if isinstance(one, Gemm))
