"""The exact accounting: which products, attentions, passes over memory and collectives one block and the ends do.

Per rank, with local shapes. A block is listed once; who multiplies it by the number of layers is ``cost.py``. Nothing
here is fitted, with the exception of how many bytes a pass moves, which is written beside it. ``planner/trace.py`` runs
the real pipeline on fake tensors and must find the same products and collectives.

T tokens of the rank, d width, q and k features of query and key heads, f inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from titanyaml.planner import constants
from titanyaml.planner.inputs import Job, Linear


@dataclass(frozen=True)
class Gemm:
    """[m, k] x [k, n]; dtype: bf16, fp8 or fp32."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """Fused causal attention; ``seq_len`` positions in all, of which this rank asks for ``share``."""

    batch: int
    heads: int
    head_dim: int
    seq_len: int
    share: float
    backward: bool

    @property
    def flops(self) -> float:
        """Half of the square; a backward pass has five products where a forward has two."""
        square = self.batch * self.heads * self.head_dim * float(self.seq_len) ** 2 * self.share
        return 2 * square * (2.5 if self.backward else 1.0)


@dataclass(frozen=True)
class Pass:
    """Kernels that only move memory. kind: elementwise, casts, loss, copies, optimizer."""

    name: str
    kind: str
    bytes: float


@dataclass(frozen=True)
class Collective:
    """bytes: of what is whole: a gather's output, a scatter's input, a reduction's tensor."""

    axis: str
    op: str
    bytes: float
    name: str = ""


Operator = Gemm | Attention | Pass | Collective


def float8(job: Job) -> bool:
    """Whether the blocks' linear layers multiply in 8 bits."""
    return job.quant != "none"


def cast_bytes(job: Job) -> float:
    """Bytes that a cast moves for an element."""
    tensorwise = job.quant == "float8_tensorwise"
    return (constants.CAST_TENSORWISE if tensorwise else constants.CAST_ROWWISE).value


def local(job: Job, one: Linear) -> tuple[int, int]:
    """(inputs, outputs) on this rank."""
    tp = job.mesh.tp
    return (one.inputs, one.outputs // tp) if one.column else (one.inputs // tp, one.outputs)


def _width(job: Job) -> str:
    return {2: "bf16", 4: "fp32", 8: "fp64"}[job.compute_bytes]


def _products(job: Job, linears: Iterable[Linear]) -> list[Operator]:
    dtype = "fp8" if float8(job) else _width(job)
    return [Gemm(one.name, job.tokens, outputs, inputs, dtype)
            for one in linears for inputs, outputs in [local(job, one)]]


def _casts(job: Job, linears: Iterable[Linear]) -> list[Operator]:
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


def _attention(job: Job, *, backward: bool) -> Attention:
    mesh, shape = job.mesh, job.shape
    return Attention(job.local_batch // job.microbatches, shape.num_heads // mesh.tp, shape.head_dim, job.seq_len,
                     1 / mesh.cp, backward)


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


def _forward_passes(job: Job) -> list[Operator]:
    """Norms, rotation, activation and residual additions of a forward.

    Compiled, in elements a token: norm 2d, rotation 2(q + k), addition and norm 4d, product 3f (ungated 2f), addition
    3d. Eager kernels pass more often (``_eager``).
    """
    d, heads, f = _widths(job)
    moved = job.compute_bytes * (9 * d + 2 * heads + (3 if job.shape.gated else 2) * f)
    return [Pass("norms, rotation, activation", "elementwise", moved + _eager(job, norm=30, rotation=24, product=4))]


def _backward_passes(job: Job) -> list[Operator]:
    """Compiled, in elements a token: two norms 8d, sums of the products' input gradients 7d, rotation 2(q + k),
    product 6f (ungated 3f)."""
    d, heads, f = _widths(job)
    moved = job.compute_bytes * (8 * d + 7 * job.tokens * job.shape.dim + 2 * heads + (6 if job.shape.gated else 3) * f)
    moved += _eager(job, norm=45, rotation=30, product=6)
    return [Pass("gradients of norms, rotation, activation", "elementwise", moved)]


def _widths(job: Job) -> tuple[int, int, int]:
    """Elements of the stream between split matrices, of queries and keys (where they are turned), of the product."""
    shape, tp = job.shape, job.mesh.tp
    heads = job.tokens * (shape.query_dim + shape.kv_dim) // tp if shape.rotary else 0
    return job.slice_tokens * shape.dim, heads, job.tokens * shape.ffn_dim // tp


def _eager(job: Job, *, norm: float, rotation: float, product: float) -> float:
    """Bytes that eager kernels move beyond compiled ones, given bytes an element: a norm in float32 piece by piece
    (where it is not one kernel), rotation in float32, gate and product in two kernels."""
    if job.compiled:
        return 0.0
    d, heads, f = _widths(job)
    norms = 0.0 if job.software.fused_norms else 2 * norm * d
    return constants.EAGER_TRAFFIC.value * (norms + rotation * heads + product * f * job.shape.gated)


def block_forward(job: Job) -> list[Operator]:
    """One block, forward."""
    gather = _tp(job, "all_gather", float8=_travels_in_float8(job)) if job.sequence_parallel else []
    scatter = _tp(job, "reduce_scatter")
    return [
        *gather, *_products(job, job.shape.linears), *_casts(job, job.shape.linears), _attention(job, backward=False),
        *_context(job, backward=False), *scatter, *gather, *scatter, *_forward_passes(job),
    ]


def redone(job: Job) -> tuple[Linear, ...]:
    """The matrices that recomputation multiplies by again. The last one is not: no gradient needs its output."""
    linears = job.shape.linears
    if job.ac in ("full", "selective_layer"):
        return linears[:-1]
    if job.ac == "selective_op":
        again = linears[0::2] if job.software.keeps_even else linears[1::2]
        return tuple(one for one in again if one is not linears[-1])
    return ()


def block_recompute(job: Job) -> list[Operator]:
    """What the backward pass of one recomputed block does again.

    ``full`` repeats attention; ``selective_op`` keeps it. ``memory_budget`` is a compiler's choice: taken as the cheap
    passes alone.
    """
    if job.ac == "none":
        return []
    if job.ac == "memory_budget":
        return _forward_passes(job)
    linears = redone(job)
    full = job.ac != "selective_op"
    gather = _tp(job, "all_gather", float8=_travels_in_float8(job)) if job.sequence_parallel else []
    scatter = [] if not full and job.software.keeps_scattered else _tp(job, "reduce_scatter")
    attention = [_attention(job, backward=False), *_context(job, backward=False)] if full else []
    return [*gather, *_products(job, linears), *_casts(job, linears), *attention, *scatter, *gather,
            *_forward_passes(job)]


def block_backward(job: Job) -> list[Operator]:
    """One block, backward, without what is recomputed."""
    operators: list[Operator] = []
    gather, scatter = _tp(job, "all_gather"), _tp(job, "reduce_scatter")
    dtype, width = ("fp8" if float8(job) else _width(job)), _width(job)
    weight_dtype = width if job.quant == "float8_rowwise_with_gw_hp" else dtype
    elements = 0
    for one in job.shape.linears:
        inputs, outputs = local(job, one)
        operators += [Gemm(f"{one.name}.dx", job.tokens, inputs, outputs, dtype),
                      Gemm(f"{one.name}.dw", outputs, inputs, job.tokens, weight_dtype)]
        elements += outputs * (job.tokens if one.column else _gathered_tokens(job))
    if float8(job):
        operators.append(Pass("cast of gradients", "casts", elements * cast_bytes(job)))
    if job.sequence_parallel:
        operators += [*gather, *scatter] * 2
    else:
        operators += scatter * 2  # all-reduces
    if job.mesh.tp > 1:
        # gradients of norms that see a part of the tokens, or of the heads
        norms = [job.shape.dim] * 2 * job.sequence_parallel + [job.shape.head_dim] * 2 * job.shape.head_norms
        operators += [Collective("tp", "all_reduce", size * max(job.compute_bytes, 4), "norm") for size in norms]
    return [*operators, _attention(job, backward=True), *_context(job, backward=True), *_backward_passes(job)]


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
    rows, dtype = shape.vocab_size // tp, _width(job)
    chunks = -(-tokens // job.chunk_tokens) if job.software.in_chunks else 0
    logits = sum(LOSS_TRAFFIC[job.software.loss]) * tokens * rows
    operators: list[Operator] = [
        Gemm("head", tokens, rows, shape.dim, dtype), Gemm("head.dx", tokens, shape.dim, rows, dtype),
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


def shard_gather(job: Job, params: float, *, block: bool) -> Collective:
    """FSDP's gather of the weights of a block or of the model's ends. params: of a tp rank."""
    width = 1 if block and job.float8_gather else job.compute_bytes
    return Collective("shard", "all_gather", params * width)


def shard_reduce(job: Job, params: float) -> Collective:
    """FSDP's sum of gradients, in float32."""
    return Collective("shard", "reduce_scatter", params * max(job.compute_bytes, 4))


def replica_reduce(job: Job, params: float) -> Collective:
    """The sum of a shard's gradient over the copies of the model."""
    return Collective("dp_replicate", "all_reduce", params / job.mesh.shards * max(job.compute_bytes, 4))


def flops(operators: Iterable[Operator]) -> int:
    """Of the matrix products."""
    return sum(one.flops for one in operators if isinstance(one, Gemm))
