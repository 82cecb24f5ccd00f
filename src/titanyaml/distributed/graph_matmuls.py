"""The collectives of a tensor-parallel block with the matmuls next to them, found and rewritten in FX graphs.

Async tensor parallelism overlaps *one* matmul with the gather before it or the scatter behind it. A block's graph has
two places where something else stands there. Each is the same value, written differently:

- backward, q/k/v and gate/up: ``scatter(reshape(a1 @ b1) + reshape(a2 @ b2) + ...)`` becomes
  ``scatter(reshape(cat(a1, a2, ...) @ cat(b1, b2, ...)))``. The sum is then formed inside one matmul, in its
  accumulator (float32 for bfloat16) instead of in the activations' dtype. The price is one copy of the weights b.
- forward, with biases: ``addmm(bias, gathered, b)`` becomes ``gathered @ b + bias``.

Graphs are those that Inductor gets after differentiation: aten operators and functional collectives; ``meta["val"]``
of a node is a fake tensor. Shapes: T tokens (B * S), K and N features of a matmul's left and right side.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from titanyaml.distributed import compat
from titanyaml.distributed import float8_reduce_scatter as float8_reduce_scatter  # registers the operator

aten = torch.ops.aten
_MATMULS = (aten.mm.default, compat.SCALED_MM)
_RESHAPES = (aten.reshape.default, aten.view.default)
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor)


@dataclass(frozen=True, order=True)
class CollectivePlace:
    """A collective of the tp ranks and the matmuls that it feeds or follows, as a key for measured times."""

    kind: str  # "all_gather" before matmuls, "reduce_scatter" behind one
    tokens: int  # of all tp ranks together
    inner: int  # features that a rank sums over
    widths: tuple[int, ...]  # output features of each matmul on a rank, ascending
    float8: bool = False  # the matmuls are in float8

    def __str__(self) -> str:
        text = f"{self.kind} {self.tokens}x{self.inner} to {'+'.join(map(str, self.widths))}"
        return f"{text} float8" if self.float8 else text


def block_places(
    tokens: int, dim: int, columns: Iterable[tuple[int, ...]], rows: Iterable[int], *, float8: bool = False
) -> list[CollectivePlace]:
    """The places of a block's forward and backward, sorted. ``tokens``: of all tp ranks. ``dim``: residual stream.
    ``columns``: output features on a rank of the matrices that read one gathered tensor: (q, k, v), (gate, up).
    ``rows``: input features on a rank of the matrices whose outputs are summed: o, down.
    """
    rows = list(rows)
    scatters = {CollectivePlace("reduce_scatter", tokens, inner, (dim,), float8) for inner in rows}
    # backward: the gradients of one input, summed over the matrices that read it
    scatters |= {CollectivePlace("reduce_scatter", tokens, sum(widths), (dim,), float8) for widths in columns}
    if float8:  # casts stand between a gather and its matmuls
        return sorted(scatters)
    gathers = {CollectivePlace("all_gather", tokens, dim, (inner,)) for inner in rows}  # backward: output gradients
    for widths in columns:
        # Recomputation may keep some of the outputs: the repeated gather then feeds only the other matmuls.
        subsets = (subset for size in range(1, len(widths) + 1) for subset in combinations(widths, size))
        gathers |= {CollectivePlace("all_gather", tokens, dim, tuple(sorted(subset))) for subset in subsets}
    return sorted(scatters | gathers)


def value(node: Node) -> Tensor:
    """The fake tensor of a node: shape, strides, dtype, device."""
    return node.meta["val"]


def _arg(node: Node, index: int) -> Any:
    """A positional argument. torch types it as a union of all that a graph may hold; here the operator tells."""
    return node.args[index]


def scattered_tensor(reduce_scatter: Node) -> Node | None:
    """The tensor that a reduce-scatter divides among ranks; None if its input joins pieces of several tensors."""
    # the collective works along dimension 0: slices along another dimension are cut and concatenated for it first
    source: Node = _arg(reduce_scatter, 0)
    if source.target is not aten.cat.default:
        return source
    cuts = (_arg(piece, 0) if piece.target is operator.getitem else piece for piece in _arg(source, 0))
    sources = {_arg(cut, 0) for cut in cuts if cut.target in _CUTS}
    return sources.pop() if len(sources) == 1 else None


def is_matmul(node: Node | None) -> bool:
    """Whether a node is ``a @ b``, or ``reshape(a @ b)`` back to the leading dimensions of a reshaped ``a``."""
    if node is not None and node.target is aten.reshape.default:
        node = _arg(node, 0)
    return node is not None and node.target in _MATMULS


def matmuls_after_gather(gathered: Node) -> CollectivePlace | None:
    """The place of the matmuls with a gathered tensor on their left; None if there are none."""
    shape = value(gathered).shape
    flat_views = [user for user in gathered.users if user.target is aten.reshape.default]
    matmuls = [
        user
        for lhs in (gathered, *flat_views)
        for user in lhs.users
        if (user.target in _MATMULS and _arg(user, 0) is lhs)
        or (user.target is aten.addmm.default and _arg(user, 1) is lhs)
    ]
    if not matmuls:
        return None
    # a float8 matmul needs a cast behind the gather, so it is no part of a place that was timed
    widths = sorted(value(matmul).shape[-1] for matmul in matmuls if matmul.target is not compat.SCALED_MM)
    return CollectivePlace("all_gather", math.prod(shape[:-1]), shape[-1], tuple(widths))


def matmul_before_scatter(reduce_scatter: Node) -> CollectivePlace | None:
    """The place of the matmul that is scattered, or that a scattered sum would be formed as; None if there is none."""
    total = scattered_tensor(reduce_scatter)
    if total is None:
        return None
    is_float8 = bool(_float8_matmuls(total))
    addends = [total] if is_matmul(total) else _addends(total)
    if len(addends) > 1 and not (is_float8 or all(_is_private_matmul(addend, total) for addend in addends)):
        return None
    matmuls = [_arg(addend, 0) if addend.target is aten.reshape.default else addend for addend in addends]
    if any(matmul.target not in _MATMULS for matmul in matmuls):
        return None
    tokens, width = value(matmuls[0]).shape
    is_plain = all(matmul.target is aten.mm.default for matmul in matmuls)
    inner = sum(value(_arg(matmul, 0)).shape[1] for matmul in matmuls)
    return CollectivePlace("reduce_scatter", tokens, inner, (width,) if is_plain or is_float8 else (), is_float8)


def fuse_float8_scatter(reduce_scatter: Node, group_name: str) -> bool:
    """Replace a scattered float8 matmul, or sum of some, by ``float8_matmul_exchange`` and a sum; False: it is none."""
    total = scattered_tensor(reduce_scatter)
    matmuls = _float8_matmuls(total) if total is not None else []
    waits = [user for user in reduce_scatter.users if user.target is compat.WAIT]
    # recomputation keeps what was scattered: such a node is an output of the forward graph
    has_foreign_user = any(user not in waits and user.op != "output" for user in reduce_scatter.users)
    if total is None or not matmuls or len(waits) != 1 or len(value(total).shape) != 3 or has_foreign_user:
        return False
    graph, [wait], batch = total.graph, waits, value(total).shape[0]
    operands = [list(operand) for operand in zip(*(matmul.args[:4] for matmul in matmuls), strict=True)]
    size = value(total).shape[1] // value(wait).shape[1]
    with graph.inserting_before(wait):
        options = (batch, _is_fast(matmuls[0]), value(total).dtype, size, group_name)
        slices = _call(graph, torch.ops.titanyaml.float8_matmul_exchange, *operands, *options)
        fused = _call(graph, aten.sum, slices, [0])  # Inductor joins it with the residual add and the norm behind
    wait.replace_all_uses_with(fused)
    reduce_scatter.replace_all_uses_with(fused, delete_user_cb=lambda user: user is not wait)
    graph.erase_node(wait)
    graph.erase_node(reduce_scatter)
    graph.eliminate_dead_code()
    return True


def merge_summed_matmuls(reduce_scatter: Node) -> None:
    """Form a scattered sum of matmuls as one matmul; any other input of the scatter stays as it is."""
    total = scattered_tensor(reduce_scatter)
    if total is None:
        return
    addends = _addends(total)
    if len(addends) < 2 or not all(_is_private_matmul(addend, total) for addend in addends):
        return
    graph, lead = total.graph, list(value(total).shape[:-1])
    matmuls: list[Node] = [_arg(addend, 0) for addend in addends]
    with graph.inserting_before(total):
        # The lefts are joined in three dimensions, where Inductor writes each next to the others as it computes it.
        lefts = [_call(graph, aten.reshape, mm.args[0], [*lead, value(_arg(mm, 0)).shape[1]]) for mm in matmuls]
        lhs = _call(graph, aten.cat, lefts, len(lead))
        flat_TK = _call(graph, aten.reshape, lhs, [math.prod(lead), value(lhs).shape[-1]])
        right_KN = _call(graph, aten.cat, [mm.args[1] for mm in matmuls], 0)
        product_TN = _call(graph, aten.mm, flat_TK, right_KN)
        result = _call(graph, aten.reshape, product_TN, list(value(total).shape))
    total.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def split_bias_from_addmm(gathered: Node) -> None:
    """Write ``addmm(bias, reshape(gathered), b)`` as a matmul, reshaped as ``gathered`` is, and an addition."""
    for flat_TK in [user for user in gathered.users if user.target is aten.reshape.default]:
        for addmm in [user for user in flat_TK.users if user.target is aten.addmm.default]:
            bias, lhs, right_KN = addmm.args
            if lhs is not flat_TK or addmm.kwargs:
                continue
            graph, lead = addmm.graph, value(gathered).shape[:-1]
            with graph.inserting_before(addmm):
                product_TN = _call(graph, aten.mm, flat_TK, right_KN)
                unflattened = _call(graph, aten.reshape, product_TN, [*lead, value(product_TN).shape[1]])
                biased = _call(graph, aten.add, unflattened, bias)
                flat_TN = _call(graph, aten.reshape, biased, list(value(product_TN).shape))
            addmm.replace_all_uses_with(flat_TN)
            graph.erase_node(addmm)


def _float8_matmuls(total: Node) -> list[Node]:
    """The matmuls that ``total`` is the sum of, if all are float8, alike and used for it alone; else none."""
    addends = _addends(total)
    matmuls = [
        _arg(node, 0) for node in addends if node.target in _RESHAPES and (len(node.users) == 1 or node is total)
    ]
    if len(matmuls) < len(addends) or any(mm.target is not compat.SCALED_MM or len(mm.users) != 1 for mm in matmuls):
        return []
    # arguments 4 and 5 are a bias and a scale of the result, which float8_matmul_exchange does not take
    are_plain = all(not mm.kwargs and mm.args[4:6] == (None, None) for mm in matmuls)
    styles = {(value(mm).dtype, _is_fast(mm)) for mm in matmuls}
    return matmuls if are_plain and styles == {(value(total).dtype, _is_fast(matmuls[0]))} else []


def _is_fast(scaled_mm: Node) -> bool:
    """Whether it adds in the short accumulator; a graph leaves out a default at the end of the arguments."""
    return len(scaled_mm.args) > 7 and bool(scaled_mm.args[7])


def _addends(node: Node) -> list[Node]:
    """The leaves of a tree of additions; a partial sum that is used elsewhere too is a leaf."""
    operands: list[Any] = list(node.args)
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(x, Node) for x in operands):
        return [node]
    return [leaf for x in operands for leaf in (_addends(x) if len(x.users) == 1 else [x])]


def _is_private_matmul(node: Node, total: Node) -> bool:
    """``reshape(mm(a, b))`` in the shape and dtype of ``total``, not used by anything else."""
    if node.target is not aten.reshape.default or len(node.users) != 1:
        return False
    matmul = _arg(node, 0)
    is_private = matmul.target is aten.mm.default and len(matmul.users) == 1
    return is_private and (value(node).shape, value(node).dtype) == (value(total).shape, value(total).dtype)


_OVERLOADS = {aten.add: "Tensor", aten.sum: "dim_IntList"}  # of the operators called here; "default" for others


def _call(graph: Graph, packet: Any, *args: Any) -> Node:
    """A new node with its fake tensor, which later passes read."""
    target = getattr(packet, _OVERLOADS.get(packet, "default"))
    node = graph.call_function(target, args)
    fakes: list[Any] = [value(used) for used in node.all_input_nodes]
    with fakes[0].fake_mode:
        node.meta["val"] = target(*map_arg(args, value))
    return node
