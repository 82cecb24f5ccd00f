"""Named random streams: every draw comes from a generator whose seed is a hash of (run seed, names).

There is no generator state to store: after a resume the same names give the same numbers. Put into the names all that
a stream may depend on: a parameter's name for initial weights, the epoch for the sample order, the data rank (never the
tp, cp or pp rank, which share activations) for dropout.
"""

import hashlib

import torch

SEED_BITS = 63  # torch.Generator takes a signed 64-bit seed


def seed_for(seed: int, *names: str | int) -> int:
    """A seed in [0, 2**63): the same for the same arguments on every machine, unrelated for any others.
    ``"1"`` and ``1`` are different names, as are ``("a", "b")`` and ``("ab",)``.
    """
    parts = [f"{type(part).__name__}:{part}" for part in (int(seed), *names)]
    text = "".join(f"{len(part)}:{part}" for part in parts)  # with lengths, no two lists of names give one text
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed_for(seed, *names))
