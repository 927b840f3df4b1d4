"""Descriptions of a config's fields, for help pages, documentation and error messages."""

import ast
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import OWN_KIND, Section, alternatives, kinds_of, variant_of
from mcore_rl.config.toml import toml_value


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDoc:
    """A field's dotted key, type in words, default as TOML ("" without); one record for each set of kinds."""

    section: type[Section]
    key: str
    annotation: Any
    type: str
    default: str
    choice: "Choice | None" = None
    """The kinds of its section that have the field; None if all have it."""

    def is_of(self, kinds: Mapping[str, Any]) -> bool:
        """Return whether the field exists for these `kind` fields, by key; missing kinds have defaults."""
        return self.choice is None or self.choice.includes(kinds)

    @property
    def meaning(self) -> str:
        """The docstring under the field in the source of its section or of a base class; empty if there is none."""
        name = self.key.rpartition(".")[2]
        bases = (base for base in self.section.__mro__ if issubclass(base, Section))
        places = ((base.__module__, base.__name__) for base in bases)
        found = (_strings_under_fields(module).get((cls, name)) for module, cls in places)
        return next((text for text in found if text), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Some of the kinds of a section that is a union by kind."""

    key: str
    kinds: tuple[str, ...]
    variants: tuple[type[Section], ...]

    def includes(self, values: Mapping[str, Any]) -> bool:
        """Return whether these kinds include the value of `kind` in `values`, or its default."""
        chosen = variant_of(self.variants, value := values.get(self.key, kinds_of(self.variants[0])[0]))
        return chosen is not None and (
            value in self.kinds or (value not in kinds_of(chosen) and OWN_KIND in self.kinds)
        )

    @property
    def is_some(self) -> bool:
        """Whether the section has further kinds."""
        return len(self.kinds) < sum(len(kinds_of(variant)) for variant in self.variants)

    def __str__(self) -> str:
        """Return the kinds in words."""
        return ", ".join(self.kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionDoc:
    """A section's dotted key ("" for the whole config), meaning, and the fields directly in it."""

    key: str
    meaning: str
    fields: tuple[FieldDoc, ...]


def describe(cls: type[Section]) -> list[FieldDoc]:
    """Return every field of `cls` and of the sections in it, in their order."""
    return [field for section in describe_sections(cls) for field in section.fields]


@functools.cache
def describe_sections(cls: type[Section], prefix: str = "", choice: Choice | None = None) -> tuple[SectionDoc, ...]:
    """Return `cls` itself, then its subsections, depth first; `choice` has the kinds if `cls` is part of a union."""
    inner = {name: field for name, field in cls.model_fields.items() if sections_of(field.annotation)}
    plain = tuple(
        FieldDoc(
            section=cls,
            key=prefix + name,
            annotation=field.annotation,
            type=type_name(field.annotation, field.metadata),
            default="" if field.is_required() else toml_value(field.get_default(call_default_factory=True)),
            choice=choice,
        )
        for name, field in cls.model_fields.items()
        if name not in inner
    )
    docs = [SectionDoc(key=prefix.rstrip("."), meaning=cls.__doc__ or "", fields=plain)]
    for name, field in inner.items():
        variants = sections_of(field.annotation)
        if len(variants) == 1:
            docs += describe_sections(variants[0], f"{prefix}{name}.", choice)
        else:
            docs += _describe_union(variants, f"{prefix}{name}.")
    return tuple(docs)


def _describe_union(variants: tuple[type[Section], ...], prefix: str) -> Iterator[SectionDoc]:
    key = f"{prefix}kind"
    all_kinds = tuple(kind for variant in variants for kind in kinds_of(variant))
    chosen = (Choice(key=key, kinds=kinds_of(variant), variants=variants) for variant in variants)
    described = [describe_sections(variant, prefix, choice) for variant, choice in zip(variants, chosen, strict=True)]
    named = tuple(kind for kind in all_kinds if kind != OWN_KIND)
    annotation = Literal[named] | Extension if OWN_KIND in all_kinds else Literal[named]
    groups: dict[tuple[str, ...], FieldDoc] = {
        (key,): FieldDoc(
            section=variants[0],
            key=key,
            annotation=annotation,
            type=type_name(annotation),
            default=toml_value(all_kinds[0]),
        )
    }
    for doc in (doc for sections in described for doc in sections[0].fields if doc.key != key):
        assert doc.choice is not None
        same = (doc.key, doc.type, doc.default, doc.meaning)
        found = groups[same].choice if same in groups else None
        before = found.kinds if found else ()
        groups[same] = replace(doc, choice=replace(doc.choice, kinds=(*before, *doc.choice.kinds)))
    order = {doc.key: None for doc in groups.values()}
    fields = tuple(
        doc if doc.choice is None or doc.choice.is_some else replace(doc, choice=None)
        for name in order
        for doc in groups.values()
        if doc.key == name
    )
    common = next(base for base in variants[0].__mro__ if all(issubclass(variant, base) for variant in variants))
    yield SectionDoc(key=prefix.rstrip("."), meaning=common.__doc__ or "", fields=fields)
    for sections in described:
        yield from sections[1:]


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """Return the section that a field of this annotation holds, or all members of a union by kind; () for a value."""
    members = alternatives(annotation)
    are_sections = all(isinstance(member, type) and issubclass(member, Section) for member in members)
    return members if are_sections else ()


def type_name(annotation: Any, bounds: Iterable[Any] = ()) -> str:
    """Return a type in words, such as "an integer >= 1"; `bounds` is pydantic's metadata of the field."""
    limits = []
    for bound in bounds:
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            limit = getattr(bound, attribute, None)
            if limit is not None:
                limits.append(f"{sign} {limit}")
        if getattr(bound, "min_length", None):
            limits.append("that is not empty")
    return f"{_bare_name(annotation)} {' and '.join(limits)}".strip()


@functools.cache
def _strings_under_fields(module: str) -> Mapping[tuple[str, str], str]:
    """Return the docstring under each field of a module, by class and field: pydantic would take long at import."""
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
        length = "" if len(args) == 1 or args[1] is Ellipsis else f" of {len(args)}"
        return f"a list{length}, each item {type_name(args[0])}"
    if origin is dict:
        return f"a table of names to {type_name(args[1])}"
    return getattr(annotation, "__name__", str(annotation))
