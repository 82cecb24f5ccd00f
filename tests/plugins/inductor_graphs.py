"""A torch.compile backend that is Inductor up to its last graph pass, and then interprets the graph.

What async tensor parallelism changes is in that graph; generating and building C++ for it would take most of a test's
time. ``GRAPHS`` holds the operators of every graph since it was last cleared.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch.fx import GraphModule

BACKEND = "inductor_graphs"
GRAPHS: list[Counter[str]] = []


def register() -> None:
    """Make ``BACKEND`` known in this process."""
    from torch._inductor.compile_fx import compile_fx

    if BACKEND not in torch.compiler.list_backends(exclude_tags=None):
        torch._dynamo.register_backend(functools.partial(compile_fx, inner_compile=_interpret), BACKEND)


def _interpret(graph: GraphModule, inputs: list, *, is_inference: bool = False, **_: object):
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    compile_fx.view_to_reshape(graph)
    with V.set_fake_mode(compile_fx.fake_tensor_prop(graph, inputs)):
        compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
    operators = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    GRAPHS.append(Counter(operator.overloadpacket.__name__ for operator in operators))
    return make_boxed_func(graph)
