"""What routers and experts of a mixture do: beside ``operators.py``, in the same terms.

N tokens of a rank (under sequence parallelism its slice), K experts of each, M = N*K pairs, E experts of which E/ep are
here, f inner width. Loads are taken as even: every expert gets as many pairs as every other, so that a rank receives as
many as it sends.
"""

from __future__ import annotations

from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.primitives import Collective, Gemm, Operator, Pass, width


def pairs(job: Job) -> int:
    """(token, expert) pairs that a rank sends, and gets."""
    return job.slice_tokens * job.shape.mixture.top_k


def products(job: Job) -> list[Gemm]:
    """The router's product, in float32 or wider, and the experts' three, each one grouped kernel."""
    of, d, mesh = job.shape.mixture, job.shape.dim, job.mesh
    rows, groups, dtype = pairs(job), of.num_experts // mesh.ep, width(job)
    wide = "fp64" if job.compute_bytes == 8 else "fp32"
    return [
        Gemm("router", job.slice_tokens, of.num_experts, d, wide),
        Gemm("experts.w1", rows, of.ffn_dim, d, dtype, groups),
        Gemm("experts.w3", rows, of.ffn_dim, d, dtype, groups),
        Gemm("experts.w2", rows, d, of.ffn_dim, dtype, groups),
    ]


def forward(job: Job) -> list[Operator]:
    """Choose, send, compute, bring back."""
    return [*products(job), *_balance(job), *_counts(job), *_rows(job), *_rows(job), _passes(job, backward=False)]


def backward(job: Job) -> list[Operator]:
    """The same way back, and the sums of gradients over tp ranks that each saw a slice of the sequence."""
    found: list[Operator] = []
    for one in products(job):
        found += [
            Gemm(f"{one.name}.dx", one.m, one.k, one.n, one.dtype, one.groups),
            Gemm(f"{one.name}.dw", one.n, one.k, one.m, one.dtype, one.groups, split="k"),
        ]
    if job.mesh.tp > 1 and job.sequence_parallel:
        shape, wide = job.shape, max(job.compute_bytes, 4)
        whole = [shape.router_params]
        whole += [shape.mixture.num_experts * shape.expert_params // 3] * 3 if job.mesh.ep == 1 else []
        found += [Collective("tp", "all_reduce", size * wide, "replicated") for size in whole]
    return [*found, *_rows(job), *_rows(job), _passes(job, backward=True)]


def saved(job: Job) -> float:
    """Elements of the compute dtype that a mixture keeps of a token, beside its shared expert: what the router read, in
    float32; its experts' rows, gate, up, their product (eager: and the gate's activation) and results; scores in
    float32, and six indices of a pair."""
    of, d, b = job.shape.mixture, job.shape.dim, job.compute_bytes
    share = 1 / job.mesh.tp if job.sequence_parallel else 1.0
    eager = not job.compiled or job.mesh.ep > 1
    wide = max(4, b) / b
    router = wide * (d + of.num_experts) + 6 * 8 * of.top_k / b
    return share * (router + of.top_k * (2 * d + (4 if eager else 3) * of.ffn_dim))


def kept(job: Job) -> float:
    """The same of selective recomputation: every second product, of which w1 and w2 are two."""
    of = job.shape.mixture
    share = 1 / job.mesh.tp if job.sequence_parallel else 1.0
    return share * of.top_k * (of.ffn_dim + job.shape.dim)


def _rows(job: Job) -> list[Operator]:
    """Pairs to the ranks of their experts, or back."""
    if job.mesh.ep == 1:
        return []
    return [Collective("ep", "all_to_all", pairs(job) * job.shape.dim * job.compute_bytes)]


def _counts(job: Job) -> list[Operator]:
    """How many pairs are for each expert, as int64."""
    return [Collective("ep", "all_to_all", 8 * job.shape.mixture.num_experts)] if job.mesh.ep > 1 else []


def _balance(job: Job) -> list[Operator]:
    """Scores and counts of each sequence, summed over the tp ranks that hold its slices."""
    if not (job.shape.mixture.balanced_by_loss and job.mesh.tp > 1 and job.sequence_parallel):
        return []
    sequences = job.local_batch // job.microbatches
    size = 2 * sequences * job.shape.mixture.num_experts * max(job.compute_bytes, 4)
    return [Collective("tp", "all_reduce", size, "balance")]


def _passes(job: Job, *, backward: bool) -> Pass:
    """Elements moved.

    Forward: tokens read and pairs written (2 M d), results gathered (2 M d), weighed and summed (M d + N d), the
    experts' product 3 M f, eager 5 M f; tokens as float32 for the router (3 N d); with ep, pairs sorted by expert and
    back (4 M d). Backward: twice that, since each has two gradients or is a gather too. Scores: 40 bytes each way.
    """
    d, of, rows = job.shape.dim, job.shape.mixture, pairs(job)
    eager = not job.compiled or job.mesh.ep > 1  # what arrives is known at run time only: never compiled
    elements = (5 + 4 * (job.mesh.ep > 1)) * rows * d + 4 * job.slice_tokens * d
    elements += (5 if eager else 3) * rows * of.ffn_dim
    scores = 40.0 * job.slice_tokens * of.num_experts
    moved = (2 if backward else 1) * elements * job.compute_bytes + scores
    return Pass("dispatch, activation, combination", "elementwise", moved)
