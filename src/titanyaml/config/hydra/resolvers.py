"""OmegaConf resolvers of the configuration: ``${titan.min:...}`` and ``${titan.slug:...}``."""

import hashlib
import re
from collections.abc import Iterable

from omegaconf import OmegaConf

# Keys that do not change the result of a job must not change the name of its folder: the same command, started in
# another way, must find its own jobs.
_NOT_IN_SLUG = re.compile(r"(\+\+?|~)?(sweep|launch|hydra)([./@=]|$)")


def slug(overrides: Iterable[str]) -> str:
    """Ten hex digits that name a sweep job by its overrides, whatever their order."""
    identity = sorted(override for override in overrides if not _NOT_IN_SLUG.match(override))
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:10]


def register() -> None:
    """Register the resolvers; may be called any number of times."""
    # not the built-in itself: OmegaConf reads a resolver's signature, and min has none
    OmegaConf.register_new_resolver("titan.min", lambda *numbers: min(numbers), replace=True)
    OmegaConf.register_new_resolver("titan.slug", slug, replace=True)
