"""The installed versions, and the calls that differ between the supported versions of Megatron-Core."""

import functools
import importlib.util
from importlib.metadata import version
from typing import Any


def megatron_version() -> str:
    """Return "major.minor" of the installed Megatron-Core."""
    return ".".join(version("megatron-core").split(".")[:2])


def has_module(name: str) -> bool:
    """Return whether the module `name` can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def as_experts_entry(experts: type) -> Any:
    """Return `experts` as a spec provider's `grouped_mlp_modules` does: in a pair, or since 0.19 as a builder."""
    return (experts, None) if megatron_version() == "0.16" else experts


def with_moe_layer(mlp: Any, moe_layer: type) -> Any:
    """Return the spec of a Mixture-of-Experts layer with a different class; since 0.19 the spec is a partial."""
    if megatron_version() == "0.16":
        mlp.module = moe_layer
        return mlp
    return functools.partial(moe_layer, *mlp.args, **mlp.keywords)


def writer_choice() -> dict[str, str]:
    """Return the arguments by which a checkpoint strategy plans for Megatron's own writer, not 0.19's default."""
    return {} if megatron_version() == "0.16" else {"async_strategy": "mcore"}
