"""OmegaConf resolvers of the configuration: ``${titan.min:...}`` and ``${titan.slug:...}``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from omegaconf import OmegaConf

# Keys that do not change the result of a job must not change the name of its folder.
_NOT_IN_SLUG = re.compile(r"(\+\+?|~)?(sweep|launch|hydra)([./@=]|$)")


def smallest(*numbers: int | float) -> int | float:
    """The smallest argument: ``${titan.min:${model.max_seq_len},8192}``."""
    return min(numbers)


def slug(overrides: Iterable[str]) -> str:
    """Ten hex digits that name a sweep job by what was overridden, whatever the order.

    Overrides of ``sweep``, ``launch`` and ``hydra`` are left out: the same job started in another way is the same job.
    """
    identity = sorted(override for override in overrides if not _NOT_IN_SLUG.match(override))
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:10]


def register() -> None:
    """Register the resolvers; may be called any number of times."""
    OmegaConf.register_new_resolver("titan.min", smallest, replace=True)
    OmegaConf.register_new_resolver("titan.slug", slug, replace=True)
