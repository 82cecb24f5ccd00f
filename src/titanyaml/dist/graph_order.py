"""Order the nodes of an FX graph so that transfers travel while matrix products are computed.

A compiler runs a graph in its order, on one stream: what stands between the start of a transfer and its wait is what it
travels behind. Differentiation puts nothing there. Without changing what is computed,

- a gather that needs no product before it (of a checkpoint's saved slice, of the incoming gradient) is started first,
  a few at a time, in the order in which products need them;
- what leads to the next transfer goes before what does not: gradients of inputs before those of weights;
- what needs the transfers that were started early goes before what needs later ones;
- a wait comes where its tensor is needed, behind all that stood before it and can be computed without it.

Nothing else moves, so that tensors live about as long as before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

#: Gathers started ahead of their place: each holds the memory of a gathered tensor.
AHEAD = 2
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def overlap_transfers(graph: Graph, multiplies: Callable[[Node], bool]) -> set[Node]:
    """Reorder a graph; returns the starts of transfers with a product between them and their wait.

    A graph that writes to its tensors stays as it is: its order means something.

    Args:
        multiplies: whether a node takes so long that a transfer hides behind it.
    """
    if not any(_writes(node) for node in graph.nodes):
        order = _Order(graph, multiplies).order()
        for node in order:
            graph.output_node().prepend(node)
    return _hidden(graph, multiplies)


class _Order:
    """A new order of a graph's nodes, grown from its inputs. Sets of nodes are numbers with a bit for each."""

    def __init__(self, graph: Graph, multiplies: Callable[[Node], bool]) -> None:
        self.nodes = list(graph.nodes)
        self.index = {node: number for number, node in enumerate(self.nodes)}
        self.needs: list[int] = []  # all that a node is computed from
        for node in self.nodes:
            above = 0
            for source in node.all_input_nodes:
                above |= self.needs[self.index[source]] | self._bit(source)
            self.needs.append(above)
        self.waits = {node: node.args[0] for node in self.nodes if node.target is _WAIT}
        self.starts = {node: None for node in self.nodes if any(user in self.waits for user in node.users)}
        products = [node for node in self.nodes if multiplies(node)]
        heavy = sum(map(self._bit, products))
        #: gathers that need no product, the one first whose tensor is multiplied first
        self.free = sorted((start for start in self.starts if start.target is _GATHER
                            and not self.needs[self.index[start]] & heavy),
                           key=lambda start: self._first(start, products))
        self.found: list[Node] = []
        self.done = 0
        self.turn: dict[Node, int] = {}  # of started transfers

    def order(self) -> list[Node]:
        """All nodes but the output."""
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._put(node)
        ahead, pinned = list(self.free), [start for start in self.starts if start not in self.free]
        for target in (*pinned, self.nodes[-1]):
            while ahead and sum(start in self.turn and not self._is_waited(start) for start in self.free) < AHEAD:
                self._advance(ahead.pop(0))
            self._advance(target)
        del self.found[-1]
        for node in self.nodes[:-1]:  # what no output needs
            self._put(node)
        return self.found

    def _advance(self, target: Node) -> None:
        """Put a node, and before it what it needs: first what needs only transfers that were started first."""
        above = self.needs[self.index[target]]
        for start in self.starts:
            if above & self._bit(start) & ~self.done:
                self._advance(start)
        missing = [node for node in self.nodes if above & self._bit(node) & ~self.done]
        for node in sorted(missing, key=self._latest):  # stable: else in their old order
            if node in self.waits and self.waits[node].target is not _REDUCE:  # of few numbers: here and gone
                self._catch_up(before=node)
            self._put(node)
        self._put(target)

    def _catch_up(self, before: Node) -> None:
        """Put what stood before a wait and is ready, or needs no other transfers than those that were started first."""
        turn = self.turn[self.waits[before]]
        for node in self.nodes[:self.index[before]]:
            later = node in self.starts or self.turn.get(self.waits.get(node), -1) > turn
            if not later and not self.needs[self.index[node]] & ~self.done:
                self._put(node)

    def _put(self, node: Node) -> None:
        if self.done & self._bit(node):
            return
        self.found.append(node)
        self.done |= self._bit(node)
        if node in self.starts:
            self.turn[node] = len(self.turn)

    def _latest(self, node: Node) -> int:
        """When the last transfer was started that a node needs; -1: it needs none."""
        reach = self.needs[self.index[node]] | self._bit(node)
        return max((self.turn[start] for wait, start in self.waits.items() if reach & self._bit(wait)), default=-1)

    def _first(self, start: Node, products: list[Node]) -> int:
        """Where the first product stands that needs a transfer."""
        return next((self.index[one] for one in products if self.needs[self.index[one]] & self._bit(start)),
                    len(self.nodes))

    def _is_waited(self, start: Node) -> bool:
        return any(self.done & self._bit(wait) for wait, of in self.waits.items() if of is start)

    def _bit(self, node: Node) -> int:
        return 1 << self.index[node]


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _hidden(graph: Graph, multiplies: Callable[[Node], bool]) -> set[Node]:
    """The starts of transfers that a product stands behind, before their wait."""
    found, open_starts = set(), set()
    for node in graph.nodes:
        if multiplies(node):
            found |= open_starts
        if node.target is _WAIT:
            open_starts.discard(node.args[0])
        elif any(user.target is _WAIT for user in node.users):
            open_starts.add(node)
    return found
