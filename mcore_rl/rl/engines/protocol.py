"""HTTP protocols of vLLM and of SGLang as one table, protocol.toml. `ServerApi` sends only what the table has; the
tests' fake servers take, refuse and swallow the same calls, in the same states.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

REQUIRED: Final = object()
"""Default of a field without which a server refuses a call."""
DIES: Final = 0
"""Status of a call that ends the server's process."""
SWALLOWED: Final = 200
"""Status of a call that is answered as if it had succeeded, although it did nothing, or harm."""
SESSION, PAUSED, COMPUTING = "session", "paused", "computing"
WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
DISCARDED = "discarded"
"""Conditions of a server: a weight update is open; requests wait; requests are in progress and do not wait; memory that
was released, by the names of tags; and weights that were not kept when it was, and that no update has sent since."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer to a call in a state in which the server does not do it."""

    when: str
    """Condition; "not " before it: its opposite; "tags asleep" and "tags awake": a tag that is, or is not, released;
    "cache first": the tags have the memory of keys and values while that of weights is released."""
    status: int
    """Status of the answer; DIES; SWALLOWED."""
    text: str
    """Part of the answer, or what happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """An address of a server, with what it takes and refuses."""

    source: str
    """File and line that say so."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields with the server's defaults, or REQUIRED."""
    place: Literal["body", "query", "get"] = "body"
    """Place of the fields: the JSON body or the address of a POST, or the address of a GET."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that a field may have; others are refused with the status `wrong_value`."""
    wrong_value: int = 422
    patterns: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions that texts of a field are matched by, whole; others are refused with the status 400."""
    answer: Literal["json", "success", "text"] = "json"
    """Form of an answer; `success`: a JSON object whose "success" must be true, as status 200 alone says nothing."""
    refusals: tuple[Refusal, ...] = ()
    sets: tuple[str, ...] = ()
    """Conditions that hold after the call; "tags": those that the field `tags` names, all if it names none."""
    clears: tuple[str, ...] = ()


def _protocols(table: Mapping[str, Any]) -> dict[str, dict[str, Route]]:
    """Return the calls of each kind of server, by path."""
    status = {"dies": DIES, "swallowed": SWALLOWED}

    def refusal(written: str | list[Any]) -> Refusal:
        when, answer, text = table["refusals"][written] if isinstance(written, str) else written
        return Refusal(when, status.get(answer, answer), text)

    def route(call: dict[str, Any]) -> Route:
        fields = dict.fromkeys(call.pop("required", ()), REQUIRED) | dict.fromkeys(call.pop("empty", ()))
        fields |= {name: tuple(value) if value == [] else value for name, value in call.pop("fields", {}).items()}
        more = {name: tuple(value) if isinstance(value, list) else value for name, value in call.items()}
        more["values"] = {name: tuple(values) for name, values in call.get("values", {}).items()}
        return Route(**more | {"fields": fields, "refusals": tuple(map(refusal, call.get("refusals", ())))})

    return {kind: {path: route(call) for path, call in table[kind].items()} for kind in ("vllm", "sglang")}


PROTOCOLS: Mapping[str, Mapping[str, Route]] = _protocols(
    tomllib.loads(Path(__file__).with_name("protocol.toml").read_text(encoding="utf-8"))
)
"""Calls of each rl.engine.kind, by path."""
