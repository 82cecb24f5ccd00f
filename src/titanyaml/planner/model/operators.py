"""Exact accounting: the GEMMs, attention, memory-bound kernels and collectives of one block and of the model's ends.

Per rank, with local shapes, each block once (``step.py`` multiplies by the layers). Nothing is fitted here but the
bytes that a kernel moves, which are written beside it. ``runner/tracing.py`` runs the real pipeline on fake tensors and
must find the same GEMM FLOPs and collectives, byte for byte. Routers and experts are in ``experts.py``.

Symbols: T tokens of a rank and microbatch (T/tp between split matrices under sequence parallelism), d width of the
residual stream, q and k features of all query and of all key heads, f inner width of the feed-forward, V vocabulary,
b bytes of the compute dtype. Matrices: wq, wk, wv, wo of attention; w1 gate, w3 up, w2 down of the feed-forward.
"""

from collections.abc import Iterable

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind, LinearShape
from titanyaml.planner.model import constants, experts
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.primitives import AttentionKernel, Collective, Gemm, MemoryPass, Operator

#: Bytes of our own casts to float8 per element, by granularity of the scales. A matrix is read once and written in both
#: layouts (4 bytes), and read for its maxima (2): always for rows and columns; for the whole matrix only where the
#: kernel before does not find them (about half). Casts run at 0.70 of a copy's rate on an H200 (``benchmarks/results``:
#: 46 and 38 ms of a step of 3B).
OWN_CAST_BYTES = {"rowwise": 6 / 0.70, "tensorwise": 5 / 0.70}

#: The least ``ac.budget`` for which the compiler repeats cheap kernels alone (3B on an H200, 0.8 and 0.5 tried).
CHEAP_BUDGET = 0.7

#: Memory traffic of the loss per logit beside its three GEMMs, in bytes: (forward, backward). Counted by kernel.
#: plain, chunked: eager kernels cast to float32, and compute log-softmax and gradients. compiled: the same, fused by
#: the compiler. fused: bf16 logits are read twice and overwritten by their gradient.
LOSS_BYTES = {"chunked": (14.0, 8.0), "fused": (6.0, 0.0), "compiled": (8.0, 4.0), "plain": (26.0, 18.0)}


def cast_bytes(job: Job) -> float:
    """Memory traffic per element of a cast to float8 in both layouts."""
    tensorwise = job.quant == "float8_tensorwise"
    if job.own_float8:
        return OWN_CAST_BYTES["tensorwise" if tensorwise else "rowwise"]
    fitted = constants.CAST_TENSORWISE if tensorwise else constants.CAST_ROWWISE
    return job.device.cast_bytes[not tensorwise] or fitted.value


def _linear_dtype(job: Job) -> str:
    return "fp8" if job.uses_float8 else job.dtype


def _gemms(job: Job, linears: Iterable[LinearShape]) -> list[Operator]:
    """Forward GEMMs: [T, inputs] x [inputs, outputs]."""
    local = [(linear.name, *linear.local(job.mesh.tp)) for linear in linears]
    return [Gemm(name, job.tokens, outputs, inputs, _linear_dtype(job)) for name, inputs, outputs in local]


def _casts(job: Job, linears: Iterable[LinearShape]) -> list[Operator]:
    """Float8 casts of a forward: of the weights, and of each input once."""
    if not job.uses_float8:
        return []
    elements, cast_inputs = 0, set()
    for linear in linears:
        inputs, outputs = linear.local(job.mesh.tp)
        elements += inputs * outputs
        if linear.reads not in cast_inputs:
            cast_inputs.add(linear.reads)
            elements += inputs * (_gathered_tokens(job) if linear.column else job.tokens)
    return [MemoryPass("cast", "casts", elements * cast_bytes(job))]


def _gathers_float8(job: Job) -> bool:
    return job.quant == "float8_tensorwise" and job.software.gathers_float8


def _gathered_tokens(job: Job) -> int:
    """Tokens that a rank casts of an all-gathered tensor: its own slice where float8 is what travels, else all."""
    return job.slice_tokens if _gathers_float8(job) else job.tokens


def _tp_transfer(job: Job, op: str, *, float8: bool = False, name: str = "") -> list[Operator]:
    """One collective of the residual stream over tp ranks; without sequence parallelism always an all-reduce."""
    if job.mesh.tp == 1:
        return []
    elements = job.tokens * job.shape.dim
    if not job.sequence_parallel:
        return [Collective("tp", "all_reduce", elements * job.compute_bytes, name)]
    size = elements * (1 if float8 else job.compute_bytes)
    transfer: list[Operator] = [Collective("tp", op, size, name)]
    # collectives split the first dimension, which is the batch: with several sequences a copy puts the sequence first
    if job.software.copies_sequence and job.local_batch > job.microbatches:
        transfer.append(MemoryPass("sequence layout", "copies", 2.0 * size))
    return transfer


def _gather_input(job: Job) -> list[Operator]:
    """All-gather of what attention or the feed-forward reads; without sequence parallelism it is whole already."""
    return _tp_transfer(job, "all_gather", float8=_gathers_float8(job)) if job.sequence_parallel else []


def _attention(job: Job, block: BlockKind, *, backward: bool) -> AttentionKernel:
    mesh, shape = job.mesh, job.shape
    batch: float = job.local_batch // job.microbatches
    length = job.seq_len
    if block.chunk is not None and block.chunk < length:  # chunks are sequences of their own
        batch, length = batch * length / block.chunk, block.chunk
    return AttentionKernel(batch, shape.num_heads // mesh.tp, shape.head_dim, length, 1 / mesh.cp, backward)


def _context(job: Job, *, backward: bool) -> list[Operator]:
    """Collectives of context parallelism around attention. A backward transfers keys and values once more."""
    mesh, shape, b = job.mesh, job.shape, job.compute_bytes
    if mesh.cp == 1:
        return []
    kv_elements = 2 * job.tokens * (shape.kv_dim // mesh.tp)
    if job.cp_method == "ulysses":  # queries, keys and values to the ranks of their heads; attention's output back
        queries = job.tokens * (shape.query_dim // mesh.tp)
        return [Collective("cp", "all_to_all", elements * b) for elements in (kv_elements + queries, queries)]
    if job.cp_method == "ring":
        # keys and values to the next rank, cp - 1 times; gradients are in fp32 where several ranks add to them
        rounds, gradient_bytes = mesh.cp - 1, b if mesh.cp == 2 else job.full_bytes
        sent: list[Operator] = [Collective("cp", "all_to_all", kv_elements * b)] * rounds
        return sent + [Collective("cp", "all_to_all", kv_elements * gradient_bytes)] * (rounds if backward else 0)
    gather = Collective("cp", "all_gather", kv_elements * b * mesh.cp, "keys and values")
    gradients = Collective("cp", "all_to_all", kv_elements * b * (mesh.cp - 1))
    return [gather, gradients] if backward else [gather]


def _forward_passes(job: Job, block: BlockKind) -> MemoryPass:
    """Norms, rotation, activation and residual additions of a forward."""
    stream, rotated, product = _pass_elements(job, block)
    # compiled, elements moved per token: norm 2d, rotation 2(q + k), addition and norm 4d, product of gate and up 3f
    # (ungated activation 2f), addition 3d
    moved: float = 9 * stream * job.stream_bytes
    moved += job.compute_bytes * (2 * rotated + (3 if job.shape.gated else 2) * product)
    moved += _eager_bytes(job, block, norm=30, rotation=24, product=4)
    return MemoryPass("norms, rotation, activation", "elementwise", moved)


def _backward_passes(job: Job, block: BlockKind) -> MemoryPass:
    stream, rotated, product = _pass_elements(job, block)
    # compiled, elements moved per token: two norms 8d, sums of the GEMMs' input gradients 7d, rotation 2(q + k),
    # product of gate and up 6f (ungated activation 3f). Input gradients are summed before tp ranks scatter them
    moved: float = (8 * stream + 7 * job.tokens * job.shape.dim) * job.stream_bytes
    moved += job.compute_bytes * (2 * rotated + (6 if job.shape.gated else 3) * product)
    moved += _eager_bytes(job, block, norm=45, rotation=30, product=6)
    return MemoryPass("gradients of norms, rotation, activation", "elementwise", moved)


def _pass_elements(job: Job, block: BlockKind) -> tuple[int, int, int]:
    """Elements on this rank of the residual stream, of rotated queries and keys, and of the product of gate and up."""
    shape, tp = job.shape, job.mesh.tp
    rotated = job.tokens * (shape.query_dim + shape.kv_dim) // tp if block.rotary else 0
    return job.slice_tokens * shape.dim, rotated, job.tokens * shape.width(block) // tp


def _eager_bytes(job: Job, block: BlockKind, *, norm: float, rotation: float, product: float) -> float:
    """Bytes that eager kernels move beyond compiled ones, from bytes per element: a norm in float32 piece by piece
    (unless it is one kernel), rotation in float32, gate and product in two kernels."""
    if job.compiled:
        return 0.0
    stream, rotated, inner = _pass_elements(job, block)
    norms = 0.0 if job.software.fused_norms else 2 * norm * stream
    return norms + rotation * rotated + product * inner * job.shape.gated


def block_forward(job: Job, block: BlockKind) -> list[Operator]:
    """Operators of one block's forward."""
    gather, scatter, linears = _gather_input(job), _tp_transfer(job, "reduce_scatter"), job.shape.linears_of(block)
    attention = [_attention(job, block, backward=False), *_context(job, backward=False)]
    mixture = experts.forward(job) if block.mixture else []
    # a mixture without a shared expert routes slices: tp ranks gather and scatter for attention alone
    ffn_transfers = [*gather, *scatter] if job.shape.width(block) else []
    matmuls = [*_gemms(job, linears), *_casts(job, linears)]
    return [*gather, *matmuls, *attention, *scatter, *mixture, *ffn_transfers, _forward_passes(job, block)]


def recomputed(job: Job, block: BlockKind, level: int = kept_matmuls.HALF) -> tuple[str, ...]:
    """Names of the GEMMs that recomputation repeats, "attention" among them where a budget repeats that.

    ``level`` says how many outputs the block keeps under ``selective_op``. The last GEMM of a feed-forward is never
    repeated: no gradient needs its output, and non-reentrant checkpointing stops before it.
    """
    if job.ac == "memory_budget":
        return _cheapest_to_repeat(job, block)
    ffn = [linear.name for linear in job.shape.ffn_linears(job.shape.width(block))]
    routed = [gemm.name for gemm in experts.gemms(job)] if block.mixture else []
    names = [*(linear.name for linear in job.shape.attention_linears), *routed, *ffn]  # in the order of the forward
    if job.ac == "none" or (job.ac == "selective_op" and level == kept_matmuls.ALL):
        names = []
    elif job.ac == "selective_op" and level == kept_matmuls.HALF:
        names = names[0::2] if job.software.keeps_even else names[1::2]
    return tuple(name for name in names if name not in ffn[-1:])


def _cheapest_to_repeat(job: Job, block: BlockKind) -> tuple[str, ...]:
    """What the compiler repeats under ``ac.budget`` beside cheap kernels.

    Large budgets: attention alone, where cheap kernels free too little. torch's partitioner counts no FLOPs for it and
    does so on the graphs of 3B, 8B and 70B under tp of 2, 4 and 8, and in 3B on two H200 (56 attention forwards in a
    step of 28 blocks). Smaller budgets: GEMMs in the order of FLOPs per byte freed, attention last, until what is left
    is the square of the budget, which ``saved_activations`` counts.
    """
    if job.ac_budget >= CHEAP_BUDGET:
        return ("attention",) if repeats_attention(job, block) else ()
    shape = job.shape
    d, q, k, f = shape.dim, shape.query_dim, shape.kv_dim, shape.width(block)
    # elements that each would free per token; cheapest first
    sizes = {"w1": f * shape.gated, "w3": f, "wv": k, "wk": k, "wq": q, "wo": d, "attention": q}
    if block.mixture:
        routed = shape.experts.top_k * shape.experts.ffn_dim
        sizes = {"experts.w1": routed, "experts.w3": routed} | sizes
        f += routed
    all_saved = 3 * d + 2 * q + 2 * k + (3 if shape.gated else 2) * f
    to_free, names = sum(sizes.values()) - job.ac_budget**2 * all_saved, []
    for name, size in sizes.items():
        if to_free > 0 and size:
            names.append(name)
            to_free -= size
    return tuple(names)


def repeats_attention(job: Job, block: BlockKind) -> bool:
    """Under a large budget whose norms are kept, the product of gate and up frees less than the budget asks for."""
    if not job.slices_stream or job.uses_float8 or block.mixture:
        return False  # graphs of float8 and of mixtures were not looked at
    shape, tp = job.shape, job.mesh.tp
    f = shape.width(block)
    # elements saved per token without a budget: the block's input and the stream after attention, queries, keys, values
    # and attention's output, gate, up and product; and both gathered inputs
    sliced = (2 * shape.dim + 2 * shape.query_dim + 2 * shape.kv_dim + (3 if shape.gated else 2) * f) / tp
    return f / tp < (1 - job.ac_budget) * (sliced + 2 * shape.dim)


def block_recompute(job: Job, block: BlockKind, level: int = kept_matmuls.HALF) -> list[Operator]:
    """What the backward of a checkpointed block computes again. ``level``: outputs kept under ``selective_op``."""
    if job.ac == "none":
        return []
    names = recomputed(job, block, level)
    linears = [linear for linear in job.shape.linears_of(block) if linear.name in names]
    if job.ac == "memory_budget":
        return _budget_recompute(job, block, names, linears)
    # full and selective_layer repeat attention, selective_op keeps its output
    selective = job.ac == "selective_op"
    attention = [] if selective else [_attention(job, block, backward=False), *_context(job, backward=False)]
    gather = _gather_input(job)
    scatter = [] if selective and job.software.keeps_scattered else _tp_transfer(job, "reduce_scatter")
    # inputs of kept GEMMs are cast again too: where no GEMM is repeated, as many as where half of them are
    cast = linears or [linear for linear in job.shape.linears_of(block) if linear.name in recomputed(job, block)]
    mixture = experts.forward(job) if block.mixture else []
    mixture = [operator for operator in mixture if not isinstance(operator, Gemm) or operator.name in names]
    ffn_gather = gather if job.shape.width(block) else []
    matmuls, passes = [*_gemms(job, linears), *_casts(job, cast)], _forward_passes(job, block)
    return [*gather, *matmuls, *attention, *scatter, *mixture, *ffn_gather, passes]


def _budget_recompute(job: Job, block: BlockKind, names: tuple[str, ...], linears: list[LinearShape]) -> list[Operator]:
    """Recomputation that a compiler's budget chose: within kernels of the backward, which write what was not kept."""
    stream, _, product = _pass_elements(job, block)
    # a budget keeps norms that tp ranks all-gather: a collective is never repeated
    norms = 0.0 if job.slices_stream else 2.0 * stream
    passes = MemoryPass("norms and product again", "elementwise", job.compute_bytes * (norms + product))
    routed = [gemm for gemm in experts.gemms(job) if gemm.name in names] if block.mixture else []
    attention = [_attention(job, block, backward=False)] if "attention" in names else []
    return [passes, *_gemms(job, linears), *_casts(job, linears), *routed, *attention]


def block_backward(job: Job, block: BlockKind) -> list[Operator]:
    """Operators of one block's backward, without what is recomputed."""
    operators: list[Operator] = []
    gather, scatter, dtype = _tp_transfer(job, "all_gather"), _tp_transfer(job, "reduce_scatter"), _linear_dtype(job)
    weight_dtype = job.dtype if job.quant == "float8_rowwise_with_gw_hp" else dtype
    gradient_elements = 0
    for linear in job.shape.linears_of(block):
        inputs, outputs = linear.local(job.mesh.tp)
        operators += Gemm(linear.name, job.tokens, outputs, inputs, dtype).gradients(weight_dtype)
        gradient_elements += outputs * (job.tokens if linear.column else _gathered_tokens(job))
    if job.uses_float8:
        operators.append(MemoryPass("cast of gradients", "casts", gradient_elements * cast_bytes(job)))
    entries = 1 + (job.shape.width(block) > 0)  # attention, and a feed-forward that every token passes
    # without sequence parallelism each input's gradient is all-reduced, and its output's is whole already
    operators += [*gather, *scatter] * entries if job.sequence_parallel else scatter * entries
    if job.mesh.tp > 1:
        # gradients of norms that see a part of the tokens, or of the heads
        norms = [job.shape.dim] * 2 * job.sequence_parallel + [job.shape.head_dim] * 2 * job.shape.head_norms
        operators += [Collective("tp", "all_reduce", size * job.full_bytes, "norm") for size in norms]
    operators += experts.backward(job) if block.mixture else []
    attention = [_attention(job, block, backward=True), *_context(job, backward=True)]
    return [*operators, *attention, _backward_passes(job, block)]


def embedding_forward(job: Job) -> list[Operator]:
    """The lookup: rows are read and written once."""
    moved = 2 * job.tokens * job.shape.dim * job.compute_bytes
    # a tp rank looks up its part of the vocabulary; the rows are summed
    return [MemoryPass("embedding", "elementwise", moved), *_tp_transfer(job, "reduce_scatter", name="embedding")]


def embedding_backward(job: Job) -> list[Operator]:
    """The stream's gradient is read and added (read, write) to rows of the table, which is zeroed first."""
    shape, b = job.shape, job.compute_bytes
    moved = job.tokens * shape.dim * b * 3 + shape.table_params * b / job.mesh.tp
    gather = _tp_transfer(job, "all_gather", name="embedding") if job.sequence_parallel else []
    return [MemoryPass("embedding", "elementwise", moved), *gather]


def head(job: Job) -> list[Operator]:
    """Final norm, head and loss, forward and backward together: a loss in chunks forms a chunk's gradient at once."""
    shape, tp, tokens = job.shape, job.mesh.tp, job.tokens
    rows = shape.vocab_size // tp
    chunks = -(-tokens // job.chunk_tokens) if job.software.loss_in_chunks else 0
    logits = sum(LOSS_BYTES[job.software.loss]) * tokens * rows
    gemm = Gemm("head", tokens, rows, shape.dim, job.dtype)
    operators: list[Operator] = [
        gemm,
        *gemm.gradients(job.dtype),
        # every chunk adds its weight gradient to a float32 [V, d]: one read and one write (8 bytes)
        MemoryPass("loss", "loss", logits + 8.0 * chunks * rows * shape.dim),
        MemoryPass("final norm", "elementwise", 10 * job.slice_tokens * shape.dim * job.compute_bytes),
    ]
    if tp == 1:
        return operators
    if not job.sequence_parallel:
        return operators + _tp_transfer(job, "all_reduce")
    norm = Collective("tp", "all_reduce", shape.dim * job.full_bytes, "norm")
    return [*operators, *_tp_transfer(job, "all_gather"), *_tp_transfer(job, "reduce_scatter"), norm]


def gemm_flops(operators: Iterable[Operator]) -> int:
    """FLOPs of the GEMMs among them."""
    return sum(operator.flops for operator in operators if isinstance(operator, Gemm))
