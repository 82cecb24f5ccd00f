"""Operators that routers and experts of a mixture add to ``operators.py``.

Symbols: N tokens of a rank (its slice under sequence parallelism), K experts of a token, M = N*K (token, expert) pairs,
E experts, of which E/ep are on this rank, f inner width of an expert, d width of the residual stream.

Loads are planned as even: every expert gets M*ep/E pairs, so that a rank receives as many as it sends. Any other load
would be a number without a source.
"""

from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.primitives import Collective, Gemm, MemoryPass, Operator


def pairs(job: Job) -> int:
    """M: (token, expert) pairs that a rank sends, and receives."""
    return job.slice_tokens * job.shape.experts.top_k


def gemms(job: Job) -> list[Gemm]:
    """The router's GEMM, in float32 or wider, and the experts' three, each one grouped kernel."""
    moe, d, m = job.shape.experts, job.shape.dim, pairs(job)
    groups = moe.num_experts // job.mesh.ep
    return [
        Gemm("router", job.slice_tokens, moe.num_experts, d, "fp64" if job.compute_bytes == 8 else "fp32"),
        Gemm("experts.w1", m, moe.ffn_dim, d, job.dtype, groups),
        Gemm("experts.w3", m, moe.ffn_dim, d, job.dtype, groups),
        Gemm("experts.w2", m, d, moe.ffn_dim, job.dtype, groups),
    ]


def forward(job: Job) -> list[Operator]:
    """Choose experts, exchange counts and rows, compute, bring the results back."""
    transfers: list[Operator] = []
    if job.shape.experts.balanced_by_loss and job.slices_stream:
        # scores and counts of each sequence, summed over the tp ranks that hold its slices
        scores = 2 * (job.local_batch // job.microbatches) * job.shape.experts.num_experts
        transfers.append(Collective("tp", "all_reduce", scores * job.full_bytes, "balance"))
    if job.mesh.ep > 1:  # how many pairs go to each expert, as int64
        transfers.append(Collective("ep", "all_to_all", 8 * job.shape.experts.num_experts))
    return [*gemms(job), *transfers, *_exchange_rows(job) * 2, _passes(job, backward=False)]


def backward(job: Job) -> list[Operator]:
    """The same way back, and gradients of weights that several tp ranks hold."""
    operators: list[Operator] = [gradient for gemm in gemms(job) for gradient in gemm.gradients(gemm.dtype)]
    if job.slices_stream:
        # tp ranks saw different tokens but hold the same router, and without ep the same experts: gradients are summed
        replicated = [job.shape.router_params]
        if job.mesh.ep == 1:
            replicated += [job.shape.experts.num_experts * job.shape.expert_params // 3] * 3
        operators += [Collective("tp", "all_reduce", params * job.full_bytes, "replicated") for params in replicated]
    return [*operators, *_exchange_rows(job) * 2, _passes(job, backward=True)]


def saved(job: Job) -> float:
    """Elements of the compute dtype that a mixture saves of a token for its backward, without its shared expert.

    Per token: the router's input and its scores, in float32. Per pair: the experts' input and output rows, gate, up and
    their product (eager: the activated gate too), and six int64 indices.
    """
    moe, d, b = job.shape.experts, job.shape.dim, job.compute_bytes
    router = job.full_bytes / b * (d + moe.num_experts) + 6 * 8 * moe.top_k / b
    return token_share(job) * (router + moe.top_k * (2 * d + (4 if _is_eager(job) else 3) * moe.ffn_dim))


def saved_by_half(job: Job) -> float:
    """The same under selective recomputation that keeps every second GEMM output: w1's and w2's of the experts."""
    moe = job.shape.experts
    return token_share(job) * moe.top_k * (moe.ffn_dim + job.shape.dim)


def token_share(job: Job) -> float:
    """Share of the tokens that a tp rank routes."""
    return 1 / job.mesh.tp if job.sequence_parallel else 1.0


def _is_eager(job: Job) -> bool:
    # with ep, the number of rows that arrive is known at run time only: experts are never compiled
    return not job.compiled or job.mesh.ep > 1


def _exchange_rows(job: Job) -> list[Operator]:
    """Rows of pairs to the ranks of their experts, or back."""
    rows = Collective("ep", "all_to_all", pairs(job) * job.shape.dim * job.compute_bytes)
    return [rows] if job.mesh.ep > 1 else []


def _passes(job: Job, *, backward: bool) -> MemoryPass:
    """Memory traffic of dispatch, activation and combination, counted kernel by kernel."""
    d, f, n, m = job.shape.dim, job.shape.experts.ffn_dim, job.slice_tokens, pairs(job)
    # tokens read and pairs written (2Md), results gathered (2Md), weighted and summed (Md + Nd); tokens as float32 for
    # the router (3Nd); with ep, pairs sorted by expert and back (4Md)
    elements = (5 + 4 * (job.mesh.ep > 1)) * m * d + 4 * n * d
    elements += (5 if _is_eager(job) else 3) * m * f  # the experts' activation and product
    # a backward has two gradients, or a gather, where the forward has one tensor
    moved: float = (2 if backward else 1) * elements * job.compute_bytes
    # scores in float32: softmax, top-k and the scatter of chosen scores
    moved += 40.0 * n * job.shape.experts.num_experts
    return MemoryPass("dispatch, activation, combination", "elementwise", moved)
