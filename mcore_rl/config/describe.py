"""The fields of a config in words: for help pages, for documentation and for error messages."""

import ast
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Section, alternatives
from mcore_rl.config.toml import toml_value


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDoc:
    """One field: its dotted key, type in words, and default as TOML ("": it has none)."""

    section: type[Section]
    """Section that it is in."""
    key: str
    annotation: Any
    type: str
    default: str

    @property
    def meaning(self) -> str:
        """The string under the field in its section's source, or in that of a base of it; empty where there is none."""
        name = self.key.rpartition(".")[2]
        bases = (base for base in self.section.__mro__ if issubclass(base, Section))
        places = ((base.__module__, base.__name__) for base in bases)
        found = (_strings_under_fields(module).get((cls, name)) for module, cls in places)
        return next((text for text in found if text), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionDoc:
    """One section: its dotted key ("" for the whole config), its meaning, and the fields directly in it."""

    key: str
    meaning: str
    fields: tuple[FieldDoc, ...]


def describe(cls: type[Section]) -> list[FieldDoc]:
    """Return every field of `cls` and of the sections in it, in their order."""
    return [field for section in describe_sections(cls) for field in section.fields]


@functools.cache
def describe_sections(cls: type[Section], prefix: str = "") -> tuple[SectionDoc, ...]:
    """Return `cls` itself, then the sections in it, depth first."""
    inner = {name: section_of(field.annotation) for name, field in cls.model_fields.items()}
    fields = tuple(
        _describe_field(cls, prefix + name, cls.model_fields[name]) for name in inner if inner[name] is None
    )
    docs = [SectionDoc(key=prefix.rstrip("."), meaning=cls.__doc__ or "", fields=fields)]
    for name, section in inner.items():
        if section is not None:
            docs += describe_sections(section, f"{prefix}{name}.")
    return tuple(docs)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field of this annotation holds, None where it is a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def type_name(annotation: Any, bounds: Iterable[Any] = ()) -> str:
    """Return a type in words, as "an integer >= 1"; `bounds` is what pydantic collected beside the annotation."""
    limits = " and ".join(_limits(bounds))
    return f"{_bare_name(annotation)} {limits}".strip()


@functools.cache
def _strings_under_fields(module: str) -> Mapping[tuple[str, str], str]:
    """Return the string under each field of the classes of a module, by names of class and field.

    Pydantic can read them too, but reads all of them whenever it is imported: half of the time of a short command.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (cls.name, field.target.id): inspect.cleandoc(below.value.value)
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for field, below in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(below.value.value, str)
    }


def _describe_field(section: type[Section], key: str, field: FieldInfo) -> FieldDoc:
    return FieldDoc(
        section=section,
        key=key,
        annotation=field.annotation,
        type=type_name(field.annotation, field.metadata),
        default="" if field.is_required() else toml_value(field.get_default(call_default_factory=True)),
    )


def _limits(bounds: Iterable[Any]) -> Iterator[str]:
    for bound in bounds:
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            limit = getattr(bound, attribute, None)
            if limit is not None:
                yield f"{sign} {limit}"
        if getattr(bound, "min_length", None):
            yield "that is not empty"


SIMPLE_NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    types.NoneType: '"none"',
    Extension: "module:name of your own",
}


def _bare_name(annotation: Any) -> str:
    if annotation in SIMPLE_NAMES:
        return SIMPLE_NAMES[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(args[0], args[1:])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(toml_value, args))
    if len(alternatives(annotation)) > 1:
        return " or ".join(map(type_name, args))
    if origin in (tuple, list):
        return _list_name(args)
    if origin is dict:
        return f"a table of names to {type_name(args[1])}"
    return getattr(annotation, "__name__", str(annotation))


def _list_name(args: tuple[Any, ...]) -> str:
    length = "" if len(args) == 1 or args[1] is Ellipsis else f" of {len(args)}"
    return f"a list{length}, each item {type_name(args[0])}"
