"""User-defined functions, which a config names as `module:name`: how they are loaded and recorded."""

import hashlib
import importlib
import inspect
import sys
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator

from mcore_rl.config.section import Section
from mcore_rl.errors import ConfigError

Choice = TypeVar("Choice")
MODEL_PART = "model:"
"""Prefix of a part of `rl.reward.parts` that is a reward model, followed by its path; it names no module."""
STEP_MODEL_PART = "step_model:"
"""Prefix of a part that is a process reward model, which scores the ends of steps."""
HTTP_PARTS = ("http:", "https:")
"""Prefixes of a part that is a reward server."""
JUDGE_PART = "judge:"
"""Prefix of a part that is a language model on a server, followed by the file of its prompt template."""
MODEL_PARTS = (MODEL_PART, STEP_MODEL_PART)
SERVED_PARTS = (*HTTP_PARTS, JUDGE_PART)
NO_EXTENSION = (*MODEL_PARTS, *SERVED_PARTS)
"""Prefixes of parts that do not name a module."""


def correct_part(correct: str | None, parts: Sequence[str]) -> str | None:
    """Return the part of `rl.reward` that decides which completions are correct; None if no part does."""
    if correct != "auto":
        return correct
    return next((part for part in parts if not part.startswith(NO_EXTENSION)), None)


def server_url(part: str) -> str:
    """Return the URL in a part's name: "http://node7:8000/score", or explicitly "http:https://node7/score"."""
    inner = part.partition(":")[2]
    return inner if inner.startswith(("http://", "https://")) else part


def is_extension(name: str) -> bool:
    """Whether `name` has the form `package.module:name`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(map(str.isidentifier, module.split(".")))


def _checked(name: str) -> str:
    if not is_extension(name):
        raise ValueError("not of the form module:name")
    return name


Extension = Annotated[str, AfterValidator(_checked)]
"""Type of a field that names a user-defined object as `module:name`."""


def load_extension(field: str, name: str) -> Any:
    """Import the user's object `name`, also from the working directory; ConfigError, with `field`, if it fails."""
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # a console script does not have it on its path
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(
            f'{field} names "{name}": {error}. Start in the folder with {module_name}, or install it.'
        ) from error
    except Exception as error:  # whatever a module of the user's does when it is imported
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f'{field} names "{name}", and {module_name} fails when it is imported: {type(error).__name__}: {error} '
            f"({frame.filename}, line {frame.lineno}). Correct it."
        ) from error
    if not callable(found := getattr(module, attribute, None)):
        raise ConfigError(
            f'{field} names "{name}", but {module.__file__} has no function {attribute}. Correct the name.'
        )
    return found


def choose(field: str, name: str, choices: Mapping[str, Choice]) -> Choice:
    """Return the entry of `choices`, or the user-defined object of the same kind if `name` is `module:name`."""
    return choices[name] if name in choices else load_extension(field, name)


def optional_package(module: str, setting: str, package: str) -> Any:
    """Import and return the module that `setting` needs. Raises ConfigError if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{setting} needs `pip install {package}`; install it or unset it") from error


def load_extensions(config: Section) -> dict[str, str]:
    """Import the user's objects of `config`; return the SHA-256 of each one's file, "" without a file."""
    hashes = {}
    for field, name in sorted(_named(config, "")):
        if name.startswith(JUDGE_PART):
            source: str | None = name.removeprefix(JUDGE_PART)
        else:
            source = inspect.getsourcefile(inspect.unwrap(load_extension(field, name)))
        hashes[name] = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
    return hashes


def _named(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    for field, info in type(section).model_fields.items():
        value = getattr(section, field)
        if isinstance(value, Section):
            yield from _named(value, f"{prefix}{field}.")
        elif _accepts_extensions(info.rebuild_annotation()):
            names = (value,) if isinstance(value, str) else value or ()
            yield from (
                (prefix + field, name)
                for name in names
                if (
                    name.startswith(JUDGE_PART)
                    if field == "parts" and name.startswith(NO_EXTENSION)
                    else is_extension(name)
                )
            )


def _accepts_extensions(annotation: Any) -> bool:
    return annotation == Extension or any(map(_accepts_extensions, typing.get_args(annotation)))
