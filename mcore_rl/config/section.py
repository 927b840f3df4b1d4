"""The base of every config section, and the types of its fields."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from annotated_types import Gt, Le
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Probability = Annotated[float, Field(ge=0, lt=1)]
"""A number from 0 to less than 1."""
Seconds = Annotated[float, Field(ge=0.001, le=31_536_000)]
"""A duration from a millisecond to a year, the range that clocks and collectives accept."""
Gibibytes = Annotated[float, Gt(0), Le(2**30)]
"""An amount of memory in GiB, up to 2**60 bytes, because limits and offsets are integers of 64 bits."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed of 32 bits, as numpy requires."""
Store = Literal["device", "host"]
"""Memory in which tensors wait: on the device or in main memory."""
Text = Annotated[str, Field(min_length=1)]
"""A text that is not empty; an optional text is `Text | None`."""


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


class Section(BaseModel):
    """Base of a section of a config: frozen, and closed to fields that are not declared.

    The string under a field documents it (describe.py). An unset field is None, written `"none"` in TOML, which has no
    null; a field that the program chooses is `"auto"`. Values that follow from fields are `cached_property`s, computed
    once.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, defer_build=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values for some fields; values that follow from them are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


OWN_KIND = "module:name"
"""Represents all user-defined kinds in lists of kinds."""


@dataclass(frozen=True, slots=True)
class ByKind:
    """Marks a field that is a union of sections, among which their field `kind` chooses; the first section is the
    default: `Annotated[Square | Circle, ByKind()] = Square()`.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema of the union, in which errors have `<CLASS>` in their path."""
        variants = get_args(source)
        choices = {_tag(variant): handler.generate_schema(variant) for variant in variants}

        def tag(value: Any) -> str | None:
            if isinstance(value, Section):
                return _tag(type(value))
            kind = value.get("kind", kinds_of(variants[0])[0]) if isinstance(value, Mapping) else None
            chosen = variant_of(variants, kind)
            return _tag(chosen) if chosen else None

        return core_schema.tagged_union_schema(choices, tag)


def kinds_of(variant: type[Section]) -> tuple[str, ...]:
    """Return the kinds that a member of a union by kind is for; `module:name` represents user-defined kinds."""
    annotation = variant.model_fields["kind"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (OWN_KIND,)


def variant_of(variants: Sequence[type[Section]], kind: Any) -> type[Section] | None:
    """Return the member of a union by kind that `kind` names; None if no member does."""
    named = next((variant for variant in variants if kind in kinds_of(variant)), None)
    own = next((variant for variant in variants if OWN_KIND in kinds_of(variant)), None)
    return named or (own if isinstance(kind, str) and ":" in kind else None)


def _tag(variant: type[Section]) -> str:
    return f"<{variant.__name__}>"
