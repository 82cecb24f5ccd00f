"""Each kernel against its reference in plain PyTorch: time and agreement, as one JSON object on stdout.

    PYTHONPATH=src:. python benchmarks/kernels.py > kernels.json

The sizes are those of Llama 3 3B at 16,384 tokens; they need a GPU with 80 GB. Times are medians of launches after a
warm-up, in milliseconds. ``wrong`` lists what does not agree; the exit code is 1 if there is anything.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import references
from titanyaml.kernels import adamw, cross_entropy, float8_cast, float8_gather, float8_linear, square_sum
from titanyaml.kernels.master_weights import join, split_master
from titanyaml.loss import IGNORE_INDEX, chunked_cross_entropy

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Bench:
    """Sizes, and what was found."""

    device: torch.device
    tokens: int = 16384
    dim: int = 3072
    ffn: int = 8192
    vocab: int = 128256
    repeats: int = 20
    results: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def ms(self, function: Callable[[], Any]) -> float:
        """Median time of a call, on the device's own clock."""
        for _ in range(3):
            function()
        return round(statistics.median(self._once(function) for _ in range(self.repeats)), 4)

    def _once(self, function: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def agree(self, name: str, ours: Tensor, reference: Tensor, bound: float) -> float:
        """Relative distance of two tensors; above ``bound`` (or NaN) it is wrong."""
        reference = reference.double()
        distance = float((ours.double() - reference).norm() / reference.norm())
        if not distance <= bound:
            self.wrong.append(f"{name}: off by {distance:.2e}, more than {bound:.0e}")
        return distance

    def same(self, name: str, ours: Tensor, reference: Tensor) -> int:
        """Bytes in which two tensors differ."""
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, reference))
        different = int((a != b).sum())
        if different:
            self.wrong.append(f"{name}: {different} of {a.numel()} bytes differ")
        return different


@contextmanager
def constants(module: Any, **values: int) -> Iterator[None]:
    """Other launch parameters for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    yield
    for name, value in before.items():
        setattr(module, name, value)


def bench_cross_entropy(bench: Bench) -> dict[str, Any]:
    """The whole loss at several chunks, the kernel alone at several launch parameters."""
    tokens, vocab = bench.tokens, bench.vocab
    hidden, weight = bench.randn(tokens, bench.dim), bench.randn(vocab, bench.dim, scale=bench.dim**-0.5)
    labels = torch.randint(vocab, (tokens,), device=bench.device)
    labels[::7] = IGNORE_INDEX

    def loss(chunk: int, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
        return chunked_cross_entropy(hidden, weight, labels, chunk, IGNORE_INDEX, True, True, "", 0, 1, fused)

    result: dict[str, Any] = {}
    expected = loss(min(1024, tokens), False)
    for name, ours, reference, bound in zip(
        ("loss", "grad_hidden", "grad_weight"), loss(min(4096, tokens), True), expected, (1e-4, 2e-2, 2e-2), strict=True
    ):
        result[f"{name}_distance"] = bench.agree(f"cross_entropy {name}", ours, reference, bound)
    del expected, ours, reference
    few = 256
    wide = F.cross_entropy(
        hidden[:few].double() @ weight.double().t(), labels[:few], reduction="sum", ignore_index=IGNORE_INDEX
    )
    for fused in (False, True):
        ours = chunked_cross_entropy(
            hidden[:few], weight, labels[:few], few, IGNORE_INDEX, False, False, "", 0, 1, fused
        )[0]
        name = f"loss_distance_to_float64_{'fused' if fused else 'torch'}"
        result[name] = bench.agree(f"cross_entropy {name}", ours, wide, 1e-4)
    del wide
    for chunk in sorted({min(chunk, tokens) for chunk in (1024, 2048, 4096, 8192)}):
        result[f"fused_ms_chunk_{chunk}"] = bench.ms(lambda chunk=chunk: loss(chunk, True))
    result["torch_ms_chunk_1024"] = bench.ms(lambda: loss(min(1024, tokens), False))
    result["three_products_ms"] = (
        bench.ms(
            lambda: (logits := hidden[: tokens // 4] @ weight.t(), logits @ weight, logits.t() @ hidden[: tokens // 4])
        )
        * 4
    )
    return result | _cross_entropy_kernel(bench)


def _cross_entropy_kernel(bench: Bench) -> dict[str, Any]:
    """Alone, at launch parameters; and on more than 2^31 logits, whose last row must be right."""
    rows, result = min(4096, bench.tokens), {}
    labels = torch.randint(bench.vocab, (bench.tokens * 33 // 32,), device=bench.device)
    logits = bench.randn(rows, bench.vocab)
    for block, warps in ((2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32)):
        with constants(cross_entropy, BLOCK=block, WARPS=warps):
            result[f"kernel_ms_{rows}_rows_block_{block}_warps_{warps}"] = bench.ms(
                lambda: cross_entropy.cross_entropy_(logits, labels[:rows], ignore_index=-100, gradient=True)
            )
    many = torch.zeros(len(labels), bench.vocab, dtype=torch.bfloat16, device=bench.device)
    many[-3:] = bench.randn(3, bench.vocab)
    last = many[-3:].clone()
    losses = cross_entropy.cross_entropy_(many, labels, ignore_index=-100, gradient=True)
    expected = references.cross_entropy_reference_(last, labels[-3:], ignore_index=-100, gradient=True)
    result["logits_of_the_large_call"] = many.numel()
    bench.agree("cross_entropy beyond 2^31: losses", losses[-3:], expected, 1e-6)
    bench.agree("cross_entropy beyond 2^31: gradients", many[-3:], last, 1e-2)
    return result


def bench_sharded_cross_entropy(bench: Bench) -> dict[str, Any]:
    """A chunk whose vocabulary lies on two ranks: both ranks' kernels against the whole's reference; times of one."""
    rows, columns = min(4096, bench.tokens), bench.vocab // 2
    full, labels = bench.randn(rows, bench.vocab), torch.randint(bench.vocab, (rows,), device=bench.device)
    labels[::7] = IGNORE_INDEX
    shards = {first: full[:, first : first + columns].contiguous() for first in (0, columns)}

    def parts(first: int) -> Tensor:
        return cross_entropy.shard_log_sum_exps(shards[first], labels, first=first)

    def finish(first: int, *, gradient: bool = True) -> Tensor:
        return cross_entropy.sharded_cross_entropy_(
            shards[first], labels, both, first=first, vocab=bench.vocab, ignore_index=IGNORE_INDEX, gradient=gradient
        )

    both = torch.stack([parts(first) for first in shards])
    losses = [finish(first) for first in shards]
    expected = references.cross_entropy_reference_(full, labels, ignore_index=IGNORE_INDEX, gradient=True)
    bench.same("sharded cross_entropy: the ranks' losses", *losses)
    result: dict[str, Any] = {
        "rows": rows,
        "columns": columns,
        "loss_distance": bench.agree("sharded cross_entropy: losses", losses[0], expected, 1e-6),
        "grad_distance": bench.agree("sharded cross_entropy: gradients", torch.cat([*shards.values()], 1), full, 1e-2),
    }
    for block, warps in ((2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32)):
        with constants(cross_entropy, BLOCK=block, WARPS=warps):
            name, ms = f"block_{block}_warps_{warps}", (bench.ms(lambda: parts(0)), bench.ms(lambda: finish(0)))
        for half, milliseconds, size in zip(("parts", "gradient"), ms, (2, 4), strict=True):
            result[f"{half}_ms_{name}"] = milliseconds
            result[f"{half}_tb_s_{name}"] = round(size * rows * columns / milliseconds / 1e9, 3)
    result["losses_alone_ms"] = bench.ms(lambda: finish(0, gradient=False))
    result["copy_ms"] = bench.ms(shards[0].clone)  # reads and writes what the gradient does
    own = labels % columns
    result["torch_ms"] = bench.ms(
        lambda: references.cross_entropy_reference_(shards[0], own, ignore_index=IGNORE_INDEX, gradient=True)
    )
    return result


def _split_ms(bench: Bench, state: list[Tensor], grad: Tensor, clip: Tensor, factors: adamw.Factors) -> float:
    """Milliseconds of the same update of a split master, which must be that of weight, master and moments."""
    weight, _, *moments = (tensor.clone() for tensor in state)
    remainder = split_master(state[1], weight)
    adamw.adamw_(weight, remainder, grad, *moments, clip, factors)
    adamw.adamw_(state[0], state[1], grad, *state[2:], clip, factors)
    bench.same("adamw: a split master is the float32 one", join(weight, remainder), state[1])
    return bench.ms(lambda: adamw.adamw_(weight, remainder, grad, *moments, clip, factors))


def bench_adamw(bench: Bench) -> dict[str, Any]:
    """One update of the embedding, stored in bfloat16, against casting, clipping, torch's fused AdamW and a copy."""
    shape = bench.vocab, bench.dim
    clip, factors = (
        torch.tensor(0.7, device=bench.device),
        adamw.Factors.at(3, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
    )
    master, grad = bench.randn(*shape, dtype=torch.float32), bench.randn(*shape, scale=1e-3)
    state = [master, bench.randn(*shape, scale=1e-3, dtype=torch.float32), bench.randn(*shape).float().square() * 1e-6]
    weight = master.bfloat16()
    twin, twin_weight = [tensor.clone() for tensor in state], weight.clone()
    adamw.adamw_(weight, state[0], grad, *state[1:], clip, factors)
    references.adamw_reference_(twin_weight, twin[0], grad, *twin[1:], clip, factors)
    result: dict[str, Any] = {
        f"{name}_distance": bench.agree(f"adamw {name}", ours, reference, bound)
        for name, ours, reference, bound in zip(
            ("master", "exp_avg", "exp_avg_sq", "weight"),
            [*state, weight],
            [*twin, twin_weight],
            (1e-6, 1e-6, 1e-6, 1e-4),
            strict=True,
        )
    }
    bench.same("adamw: the stored weight is the rounded master", weight, state[0].bfloat16())
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        with constants(adamw, BLOCK=block, WARPS=warps):
            ms = bench.ms(lambda: adamw.adamw_(weight, state[0], grad, *state[1:], clip, factors))
        result[f"fused_ms_block_{block}_warps_{warps}"] = ms
        result[f"fused_tb_s_block_{block}_warps_{warps}"] = round(28 * weight.numel() / ms / 1e9, 3)
    del twin, twin_weight
    result["split_ms"] = _split_ms(bench, [weight, *state], grad, clip, factors)
    parameter = torch.nn.Parameter(state[0])
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=bench.device.type == "cuda")

    def plain() -> None:
        parameter.grad = grad.float()
        parameter.grad.mul_(clip)
        optimizer.step()
        weight.copy_(parameter.detach())

    result["torch_ms"] = bench.ms(plain)
    return result


def bench_float8_cast(bench: Bench) -> dict[str, Any]:
    """Both copies, against the reference, compiled where that is possible."""

    def both(x: Tensor, rowwise: bool, fused: bool, **options: Any) -> float8_cast.Float8Copies:
        largest = float8_cast.compute_amax(x, rowwise=rowwise, fused=fused)
        return float8_cast.float8_cast(x, largest, fused=fused, **options)

    result: dict[str, Any] = {}
    compiled = torch.compile(both, dynamic=False) if bench.device.type == "cuda" else both
    for rows, columns in ((bench.tokens, bench.dim), (bench.tokens, bench.ffn), (bench.ffn, bench.dim), (200, 72)):
        x = bench.randn(rows, columns)
        for rowwise in (True, False):
            for dtype in (E4M3, E5M2):
                options: dict[str, Any] = {"dtype": dtype, "power_of_2": rowwise}
                name = f"{rows}x{columns} {'rowwise' if rowwise else 'tensorwise'} {str(dtype)[-4:]}"
                ours, reference = (both(x, rowwise, fused, **options) for fused in (True, False))
                different = sum(bench.same(f"float8_cast {name}", *two) for two in zip(ours, reference, strict=True))
                result[name] = {"different_bytes": different}
                if dtype == E4M3 and columns != 72:
                    ms = bench.ms(lambda x=x, r=rowwise, o=options: compiled(x, r, True, **o))
                    result[name] |= {
                        "fused_ms": ms,
                        "fused_tb_s": round(6 * x.numel() / ms / 1e9, 3),
                        "torch_ms": bench.ms(lambda x=x, r=rowwise, o=options: compiled(x, r, False, **o)),
                    }
    return result


def bench_float8_linear(bench: Bench) -> dict[str, Any]:
    """Forward and backward of one feed-forward product, against bfloat16."""
    x, w = bench.randn(bench.tokens, bench.dim), bench.randn(bench.ffn, bench.dim, scale=0.02)
    grad = bench.randn(bench.tokens, bench.ffn, scale=1e-3)
    x.requires_grad_(), w.requires_grad_()

    def both(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        y = function(x, w)
        return [y.detach(), *torch.autograd.grad(y, (x, w), grad)]

    expected = both(F.linear)
    result: dict[str, Any] = {"bfloat16_ms": bench.ms(lambda: both(F.linear))}
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        for fast, dtype in ((True, E4M3), (False, E4M3), (True, E5M2)):
            name = f"{recipe} {'fast' if fast else 'slow'} {str(dtype)[-4:]}"
            options: dict[str, Any] = {"recipe": recipe, "fast_accum": fast, "grad_dtype": dtype}
            fused, unfused = (
                functools.partial(float8_linear.float8_linear, options=float8_linear.Float8Options(**options, fused=f))
                for f in (True, False)
            )
            try:
                got, plain = both(fused), both(unfused)
                result[name] = {"ms": bench.ms(functools.partial(both, fused))}
            except RuntimeError as error:  # a combination that this release's products do not take
                bench.wrong.append(f"float8_linear {name}: {error}")
                continue
            bound = 0.05 if dtype == E4M3 else 0.075
            for tensor, ours, reference, exact in zip(("y", "grad_x", "grad_w"), got, plain, expected, strict=True):
                bench.same(f"float8_linear {name} {tensor}, fused and plain cast", ours, reference)
                result[name][f"{tensor}_distance"] = bench.agree(f"float8_linear {name} {tensor}", ours, exact, bound)
    return result


def bench_square_sum(bench: Bench) -> dict[str, Any]:
    """The gradients of four blocks, against PyTorch's norms of many tensors and a copy of as many bytes."""
    shapes = [(bench.dim, bench.dim), (bench.dim // 3, bench.dim), (bench.ffn, bench.dim), (bench.dim,)]
    grads = [bench.randn(*shape, scale=1e-3) for _ in range(4) for shape in (shapes * 2)[:-1] + shapes[2:3]]
    result: dict[str, Any] = {"bytes": 2 * sum(grad.numel() for grad in grads)}
    result["distance"] = bench.agree(
        "square_sum", square_sum.square_sum(grads), references.square_sum_reference(grads), 1e-6
    )
    for block, blocks, warps in ((8192, 8, 8), (8192, 4, 8), (8192, 2, 8), (8192, 1, 8), (4096, 4, 4), (4096, 2, 4)):
        with constants(square_sum, BLOCK=block, BLOCKS=blocks, WARPS=warps):
            result[f"ms_block_{block}_blocks_{blocks}_warps_{warps}"] = bench.ms(lambda: square_sum.square_sum(grads))
    result["torch_ms"] = bench.ms(lambda: torch.nn.utils.get_total_norm(grads))
    full = torch.empty(result["bytes"] // 2, dtype=torch.uint8, device=bench.device)
    result["copy_ms"] = bench.ms(full.clone)  # reads and writes half of it each
    return result


def bench_float8_shards(bench: Bench) -> dict[str, Any]:
    """The shards of four blocks on one of two ranks, and the turn of a weight."""
    shapes = [(bench.dim // 2, bench.dim)] * 2 + [(bench.ffn // 2, bench.dim)] * 3
    shards = [bench.randn(*shape, scale=0.02, dtype=torch.float32) for _ in range(4) for shape in shapes]

    def made(fused: bool) -> list[Tensor]:
        copies = float8_gather.Float8Shards(shards, dtype=torch.bfloat16, fused=fused)
        copies.cast(copies.amax())
        return copies.data

    result: dict[str, Any] = {"numbers": sum(shard.numel() for shard in shards)}
    result["different_bytes"] = sum(
        bench.same("float8_shards", *two) for two in zip(made(True), made(False), strict=True)
    )
    for fused in (True, False):
        copies = float8_gather.Float8Shards(shards, dtype=torch.bfloat16, fused=fused)
        for programs, tile in ((256, 4096), (128, 4096), (256, 8192), (64, 8192)) if fused else ((0, 0),):
            with constants(float8_gather, PROGRAMS=programs, TILE=tile):
                name = f"ms_programs_{programs}_tile_{tile}" if fused else "torch_ms"
                result[name] = bench.ms(lambda copies=copies: copies.cast(copies.amax()))
    x = bench.randn(bench.ffn, bench.dim).to(E4M3)
    turned = functools.partial(float8_cast.transpose_float8, x, after=x)
    bench.same("transpose_float8", turned(fused=True), turned(fused=False))
    for tile, warps in ((128, 8), (128, 4), (64, 4)):
        with constants(float8_cast, TRANSPOSE_TILE=tile, TRANSPOSE_WARPS=warps):
            result[f"turn_ms_tile_{tile}_warps_{warps}"] = bench.ms(lambda: turned(fused=True))
    return result | {"turn_torch_ms": bench.ms(lambda: turned(fused=False)), "turn_copy_ms": bench.ms(x.clone)}


PARTS = {
    "cross_entropy": bench_cross_entropy,
    "sharded_cross_entropy": bench_sharded_cross_entropy,
    "adamw": bench_adamw,
    "float8_cast": bench_float8_cast,
    "float8_linear": bench_float8_linear,
    "float8_shards": bench_float8_shards,
    "square_sum": bench_square_sum,
}


def run(bench: Bench, parts: list[str]) -> dict[str, Any]:
    """Every part, also after one that failed."""
    torch.manual_seed(0)
    for name in parts:
        try:
            bench.results[name] = PARTS[name](bench)
        except Exception as error:  # noqa: BLE001 - the other kernels are to be measured too
            bench.wrong.append(f"{name}: {type(error).__name__}: {error}")
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    return {"device": device, "torch": torch.__version__, "results": bench.results, "wrong": bench.wrong}


def main() -> int:
    """Print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    report = run(Bench(torch.device("cuda")), parser.parse_args().parts or list(PARTS))
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
