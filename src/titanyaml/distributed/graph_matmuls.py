"""Rearrange the matrix products of an FX graph so that one product stands next to one collective.

Async tensor parallelism overlaps *one* product with the gather before it or the scatter behind it. A block's graph has
two places where that is not what stands there, and each is the same value written differently:

- backward, q/k/v and gate/up: ``scatter(reshape(a1 @ b1) + reshape(a2 @ b2) + ...)`` is
  ``scatter(reshape(cat(a1, a2, ...) @ cat(b1, b2, ...)))``: the sum is formed inside one product, in its accumulator
  (float32 for bfloat16) instead of in the activations' dtype. The lefts are written side by side where they are made;
  the rights, weights, are copied once.
- forward, with biases: ``addmm(bias, gathered, b)`` is ``gathered @ b + bias``.

Graphs are those that Inductor gets after differentiation: aten operators, functional collectives, the meta value of a
node a fake tensor. Shapes: T tokens (B * S), K and N features of a product's left and right.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from titanyaml.distributed import float8_reduce_scatter  # noqa: F401 - registers the operator

aten = torch.ops.aten


def value(node: Node) -> Tensor:
    """The fake tensor of a node: shape, strides, dtype, device."""
    return node.meta["val"]


def scattered(reduce_scatter: Node) -> Node | None:
    """The tensor that a reduce-scatter divides: its input, or what was cut and stacked to be its input.

    The collective works along dimension 0; slices along another dimension are stacked first. None where the stack
    holds pieces of several tensors.
    """
    stacked = reduce_scatter.args[0]
    if stacked.target is not aten.cat.default:
        return stacked
    cuts = (piece.args[0] if piece.target is operator.getitem else piece for piece in stacked.args[0])
    sources = {cut.args[0] for cut in cuts if cut.target in _CUTS}
    return sources.pop() if len(sources) == 1 else None


def is_matmul(node: Node | None) -> bool:
    """Whether a node is ``reshape(a @ b)`` back to the leading dimensions of a reshaped ``a``, or ``a @ b`` itself."""
    return node is not None and (
        node.target in _PRODUCTS or (node.target is aten.reshape.default and node.args[0].target in _PRODUCTS)
    )


#: Tokens, inner features, ascending widths of products, and whether they are in float8; none of a gather's such.
Sizes = tuple[int, int, tuple[int, ...], bool]


def matmuls_after_gather(gathered: Node) -> Sizes | None:
    """Of the products with a gathered tensor on their left; None where there are none."""
    tensor = value(gathered)
    flats = [user for user in gathered.users if user.target is aten.reshape.default]
    products = [
        mm
        for left in (gathered, *flats)
        for mm in left.users
        if (mm.target in _PRODUCTS and mm.args[0] is left) or (mm.target is aten.addmm.default and mm.args[1] is left)
    ]
    widths = tuple(sorted(value(mm).shape[-1] for mm in products if mm.target is not aten._scaled_mm.default))
    return (math.prod(tensor.shape[:-1]), tensor.shape[-1], widths, False) if products else None


def matmul_before_scatter(reduce_scatter: Node) -> Sizes | None:
    """Of the product that is scattered, or of the one that a scattered sum would be formed as; None where there is
    none."""
    total = scattered(reduce_scatter)
    if total is None:
        return None
    is_float8, addends = bool(_float8_products(total)), [total] if is_matmul(total) else _addends(total)
    if len(addends) > 1 and not (is_float8 or all(_is_private_product(one, total) for one in addends)):
        return None
    products = [node.args[0] if node.target is aten.reshape.default else node for node in addends]
    if any(node.target not in _PRODUCTS for node in products):
        return None
    tokens, width = value(products[0]).shape
    plain = all(node.target is aten.mm.default for node in products)
    inner = sum(value(node.args[0]).shape[1] for node in products)
    return tokens, inner, (width,) * (plain or is_float8), is_float8


def fuse_float8_scatter(reduce_scatter: Node, group_name: str) -> bool:
    """Put ``float8_matmul_exchange`` and a sum in the place of a scattered float8 product, or sum of such; whether it
    is one."""
    total = scattered(reduce_scatter)
    products = _float8_products(total) if total is not None else []
    waits = [user for user in reduce_scatter.users if user.target is _WAIT]
    others = [user for user in reduce_scatter.users if user not in waits]  # a checkpoint keeps what was scattered
    if not products or len(waits) != 1 or len(value(total).shape) != 3 or any(user.op != "output" for user in others):
        return False
    graph, [wait] = total.graph, waits
    lefts, rights, left_scales, right_scales = zip(*(mm.args[:4] for mm in products), strict=True)
    size = value(total).shape[1] // value(wait).shape[1]
    with graph.inserting_before(wait):
        slices = _call(
            graph,
            torch.ops.titanyaml.float8_matmul_exchange,
            list(lefts),
            list(rights),
            list(left_scales),
            list(right_scales),
            value(total).shape[0],
            _fast(products[0]),
            value(total).dtype,
            size,
            group_name,
        )
        fused = _call(graph, aten.sum, slices, [0])
    wait.replace_all_uses_with(fused)
    reduce_scatter.replace_all_uses_with(fused, delete_user_cb=lambda user: user is not wait)
    graph.erase_node(wait)
    graph.erase_node(reduce_scatter)
    graph.eliminate_dead_code()
    return True


def _float8_products(total: Node) -> list[Node]:
    """The products that a tensor is the sum of, where these are all in float8, alike and for it alone; else none."""
    addends = _addends(total)
    products = [
        node.args[0] for node in addends if node.target in _RESHAPES and (len(node.users) == 1 or node is total)
    ]
    if len(products) < len(addends) or any(
        mm.target is not aten._scaled_mm.default or len(mm.users) != 1 for mm in products
    ):
        return []
    plain = all(not mm.kwargs and mm.args[4:6] == (None, None) for mm in products)  # no bias, no scale of the result
    alike = {(value(mm).dtype, _fast(mm)) for mm in products} == {(value(total).dtype, _fast(products[0]))}
    return products if plain and alike else []


def _fast(scaled_mm: Node) -> bool:
    """Whether it adds in the short accumulator; a default at the end is not among a node's arguments."""
    return len(scaled_mm.args) > 7 and bool(scaled_mm.args[7])


def merge_summed_matmuls(reduce_scatter: Node) -> None:
    """Form a scattered sum of products as one product; whatever is not such a sum stays as it is."""
    total = scattered(reduce_scatter)
    addends = _addends(total) if total is not None else []
    if len(addends) < 2 or not all(_is_private_product(node, total) for node in addends):
        return
    graph, lead = total.graph, list(value(total).shape[:-1])
    products = [addend.args[0] for addend in addends]
    with graph.inserting_before(total):
        lefts = [_call(graph, aten.reshape, mm.args[0], [*lead, value(mm.args[0]).shape[1]]) for mm in products]
        left = _call(graph, aten.cat, lefts, len(lead))
        flat_TK = _call(graph, aten.reshape, left, [math.prod(lead), value(left).shape[-1]])
        right_KN = _call(graph, aten.cat, [mm.args[1] for mm in products], 0)
        product_TN = _call(graph, aten.mm, flat_TK, right_KN)
        result = _call(graph, aten.reshape, product_TN, list(value(total).shape))
    total.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def split_bias_from_addmm(gathered: Node) -> None:
    """Write ``addmm(bias, reshape(gathered), b)`` as a product, reshaped as ``gathered`` is, and an addition."""
    for flat_TK in [user for user in gathered.users if user.target is aten.reshape.default]:
        for addmm in [user for user in flat_TK.users if user.target is aten.addmm.default]:
            bias, left, right_KN = addmm.args
            if left is not flat_TK or addmm.kwargs:
                continue
            graph, lead = addmm.graph, value(gathered).shape[:-1]
            with graph.inserting_before(addmm):
                product_TN = _call(graph, aten.mm, flat_TK, right_KN)
                wide = _call(graph, aten.reshape, product_TN, [*lead, value(product_TN).shape[1]])
                biased = _call(graph, aten.add, wide, bias)
                flat_TN = _call(graph, aten.reshape, biased, list(value(product_TN).shape))
            addmm.replace_all_uses_with(flat_TN)
            graph.erase_node(addmm)


_PRODUCTS = (aten.mm.default, aten._scaled_mm.default)
_RESHAPES = (aten.reshape.default, aten.view.default)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor)
_OVERLOADS = {
    aten.reshape: "default",
    aten.cat: "default",
    aten.mm: "default",
    aten.add: "Tensor",
    aten.sum: "dim_IntList",
    torch.ops.titanyaml.float8_matmul_exchange: "default",
}


def _addends(node: Node) -> list[Node]:
    """The leaves of a tree of additions; a partial sum that is used elsewhere too is a leaf."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(one, Node) for one in node.args):
        return [node]
    return [leaf for one in node.args for leaf in (_addends(one) if len(one.users) == 1 else [one])]


def _is_private_product(node: Node, total: Node) -> bool:
    """``reshape(mm(a, b))`` in the shape and dtype of ``total``, not used by anything else."""
    if node.target is not aten.reshape.default or len(node.users) != 1:
        return False
    mm = node.args[0]
    return (
        mm.target is aten.mm.default
        and len(mm.users) == 1
        and value(node).shape == value(total).shape
        and value(node).dtype == value(total).dtype
    )


def _call(graph: Graph, packet: Any, *args: Any) -> Node:
    """A new node with its meta value, which later passes read."""
    target = getattr(packet, _OVERLOADS[packet])
    node = graph.call_function(target, args)
    fake = map_arg(args, value)
    with next(value(one) for one in node.all_input_nodes).fake_mode:
        node.meta["val"] = target(*fake)
    return node
