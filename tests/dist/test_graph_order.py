"""The order of a graph with transfers: what travels behind what, that nothing else changes, and where it keeps out."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx import Graph, Node

from titanyaml.dist.graph_order import AHEAD, overlap_transfers
from titanyaml.dist.graph_products import multiplies

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Sketch:
    """A graph whose nodes have names."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, name: str) -> Node:
        return self.graph.placeholder(name)

    def product(self, name: str, a: Node, b: Node) -> Node:
        return self.graph.create_node("call_function", aten.mm.default, (a, b), name=name)

    def add(self, name: str, *nodes: Node) -> Node:
        return self.graph.create_node("call_function", aten.add.Tensor, (nodes[0], nodes[-1]), name=name)

    def transfer(self, name: str, node: Node, target=c10d.all_gather_into_tensor.default) -> Node:
        """Its wait; the start is called ``name``."""
        start = self.graph.create_node("call_function", target, (node, 2, "0"), name=name)
        return self.graph.create_node("call_function", c10d.wait_tensor.default, (start,), name=f"{name}_wait")

    def order(self, *outputs: Node) -> str:
        self.graph.output(outputs)
        hidden = overlap_transfers(self.graph, multiplies)
        self.graph.lint()
        self.hidden = {node.name for node in hidden}
        return " ".join(node.name for node in self.graph.nodes if node.op == "call_function")


def test_a_backward_pass() -> None:
    """Of a feed-forward whose input is gathered once more, and of what comes before it."""
    s = Sketch()
    x, w, saved, earlier, grad = (s.input(name) for name in ("x", "w", "saved", "earlier", "grad"))
    grad = s.transfer("grad_gather", grad)
    x = s.transfer("x_gather", s.add("norm", x))
    gate = s.product("gate", x, w)
    of_w = s.product("of_w", gate, grad)
    of_x = s.product("of_x", s.add("silu", grad, gate), w)
    grad_x = s.transfer("scatter", of_x, c10d.reduce_scatter_tensor.default)
    more = s.transfer("more_gather", grad_x)
    old = s.transfer("old_gather", s.add("old", earlier))
    again = s.product("again", old, w)
    assert s.order(of_w, s.product("both", again, more), s.product("last", saved, w)) == (
        "norm x_gather grad_gather x_gather_wait gate "  # what is needed first is sent first; the other behind a product
        "grad_gather_wait silu of_x scatter "  # the gradient of an input before that of a weight,
        "old old_gather of_w scatter_wait more_gather "  # behind which it travels
        "last old_gather_wait again more_gather_wait both")
    assert s.hidden == {"grad_gather", "scatter", "old_gather", "more_gather"}


def test_gathers_are_started_a_few_at_a_time() -> None:
    s = Sketch()
    inputs = [s.input(f"x{number}") for number in range(5)]
    total = s.input("total")
    for number, x in enumerate(inputs):
        total = s.product(f"product{number}", s.transfer(f"gather{number}", x), total)
        total = s.transfer(f"scatter{number}", total, c10d.reduce_scatter_tensor.default)
    order = s.order(total).split()
    for number in range(5):
        started = sum(name.startswith("gather") and not name.endswith("wait")
                      for name in order[:order.index(f"gather{number}_wait")])
        assert started == min(number + AHEAD, 5)


def test_nothing_to_hide_and_nothing_to_hide_behind() -> None:
    s = Sketch()
    x, w = s.input("x"), s.input("w")
    assert s.order(s.product("second", s.transfer("gather", s.product("first", x, w)), w)) == (
        "first gather gather_wait second")
    assert not s.hidden


def test_a_graph_that_writes_stays_as_it_is() -> None:
    s = Sketch()
    x, w, y = s.input("x"), s.input("w"), s.input("y")
    first = s.product("first", x, w)
    write = s.graph.create_node("call_function", aten.copy_.default, (y, first), name="write")
    gathered = s.transfer("gather", y)
    assert s.order(write, gathered) == "first write gather gather_wait"


@pytest.mark.parametrize("seed", range(20))
def test_any_graph_keeps_its_nodes_and_their_inputs(seed: int) -> None:
    draw, s = random.Random(seed), Sketch()
    nodes = [s.input(f"x{number}") for number in range(4)]
    for number in range(60):
        a, b = draw.choices(nodes[-12:], k=2)
        kind = draw.random()
        nodes.append(s.product(f"n{number}", a, b) if kind < 0.3 else s.add(f"n{number}", a, b) if kind < 0.7 else
                     s.transfer(f"n{number}", a, draw.choice([c10d.all_gather_into_tensor.default,
                                                             c10d.reduce_scatter_tensor.default])))
    before = {node: node.all_input_nodes for node in s.graph.nodes}
    s.order(*nodes[-6:])  # with torch's own check that each stands behind its inputs
    after = {node: node.all_input_nodes for node in s.graph.nodes if node.op != "output"}
    assert before == after
    assert all(name.startswith("n") for name in s.hidden)
