"""The commands of `mcore-rl` by subject, from commands.toml: what they are for, what they take, and what runs them.

Neither configs nor torch are imported here, so that help and completion are quick; the module of a command is imported
when it runs.
"""

import argparse
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.config import TRAININGS
from mcore_rl.config.recipes import cluster_file
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError

BYTES_PER_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
EVAL_RECIPE = "any_model/eval"
Declare = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of `mcore-rl`."""

    brief: str
    """Purpose in a few words, for the list of all commands, which is 80 columns wide."""
    summary: str
    example: str
    arguments: Declare
    module: str
    """Module of `main`, or, with `program`, a module with a `main(argv)` that runs one rank of the command."""
    main: str = "main"
    """Function of the module that takes the parsed arguments and returns the exit status."""
    program: str | None = None
    """Name in PROGRAMS of the training program that the command starts ranks of; None if it runs in this process."""
    other_programs: Sequence[str] = ()
    """Names of further training programs with configs that the command accepts; the config's fields decide."""
    config: str = ""
    """Name in KINDS (config/kinds.py) of the config that the help explains field by field; "" without a config."""

    def given(self, args: argparse.Namespace) -> tuple[str, list[str]]:
        """Return the config and the overrides for the arguments of a command with `program`."""
        if "model" in args:
            return eval_config(args)
        return args.config, [*args.overrides, *(args.console or ())]


def eval_config(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the config and the overrides for the arguments of `mcore-rl eval`. Raises ConfigError if they conflict."""
    config, words = args.config, list(args.overrides)
    if args.model is None:
        if config is None or args.data or args.reward:
            raise ConfigError("Give CONFIG, the folder of a run, or --model FOLDER with --data FILE and --reward PART.")
        if (Path(config) / "config.toml").is_file():
            return f"{config}/config.toml", [f"run_dir={config}", *words]
        return config, words
    if config is not None and "=" not in config:
        raise ConfigError(f"--model is given in the place of CONFIG. Leave {config} out, or set model.path in it.")
    if not args.data:
        raise ConfigError("--model needs questions. Give --data FILE, JSON lines with question and answer.")
    if config is not None:
        words.insert(0, config)  # an override that the parser took for the config
    files = toml_value(args.data)
    given = [f"model.path={args.model}", f"rl.eval.files={files}", f"rl.prompts.files={files}"]
    if args.reward:
        given.append(f"rl.reward.parts={toml_value(args.reward)}")
    return EVAL_RECIPE, [*given, *words]


def world_sizes(text: str) -> tuple[int, int]:
    """Parse a range of world sizes such as `8..1024`."""
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and last.isdecimal() and dots) or not 0 < int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of sizes. Write 8..1024.")
    return int(first), int(last)


def num_bytes(text: str) -> int:
    """Parse a number of bytes such as `8G`, `500M` or `1.5T`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write 8G, or 500M.")
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])


def number_from(least: int, most: float = math.inf, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return a parser of a finite number from `least` to `most`, which argparse refuses otherwise."""
    wanted = f"{least} or more" if most == math.inf else f"a number from {least} to {most:g}"

    def number(text: str) -> float:
        value = kind(text)
        if not (least <= value <= most and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text}, wanted {wanted}")
        return value

    return number


TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "count": number_from(1),
    "index": number_from(0),
    "fraction": number_from(0, 1, float),
    "at_least_1": number_from(1, kind=float),
    "bytes": num_bytes,
    "world_sizes": world_sizes,
    "cluster": cluster_file,
}
"""Parsers of values, by `type` in commands.toml."""
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
_SHARED: dict[str, str] = _TABLE.pop("shared")


def _declare(rows: str, parser: argparse.ArgumentParser) -> None:
    """Declare arguments in the syntax that the head of commands.toml explains."""
    while found := re.search(r"^@(\w+)$", rows, re.MULTILINE):
        rows = rows.replace(found[0], _SHARED[found[1]].strip())
    container: argparse._ActionsContainer = parser
    group: argparse._ActionsContainer = parser
    for row in re.split(r"\n(?=\S)", rows.strip()) if rows else ():
        head, text = (*re.split(r"\s{2,}", row.strip(), maxsplit=1), "")[:2]
        if head.startswith("["):
            container = group = parser.add_argument_group(head.strip("[]"))
        elif head.startswith("{"):
            container = group.add_mutually_exclusive_group(required="required" in head)
        elif head == "}":
            container = group
        else:
            _add(container, head.split(), " ".join(text.split()).replace("<CONFIG>", _SHARED["CONFIG"]))


def _add(container: argparse._ActionsContainer, words: Sequence[str], meaning: str) -> None:
    names = [word for word in words if "=" not in word and word not in ("flag", "required")]
    options: dict[str, Any] = dict(word.partition("=")[::2] for word in words if "=" in word)
    if "flag" in words:
        options["action"] = "store_true"
    if "required" in words:
        options["required"] = True
    if options.get("action") == "boolean":
        options["action"] = argparse.BooleanOptionalAction
    if choices := options.get("choices"):
        options["choices"] = choices.replace("TRAININGS", ",".join(TRAININGS)).split(",")
    if kind := options.get("type"):
        options["type"] = TYPES[kind]
        if "default" in options:
            default = TYPES[kind](options["default"])
            options["default"] = [default] if options.get("nargs") == "*" else default
    container.add_argument(*names, help=meaning, **options)


COMMAND_GROUPS = {
    title: {name: Command(arguments=partial(_declare, row.pop("arguments", "")), **row) for name, row in rows.items()}
    for title, rows in _TABLE.items()
}
"""All commands by subject, in the order of the overview."""
COMMANDS = {name: command for group in COMMAND_GROUPS.values() for name, command in group.items()}
"""Every command by name; a name of two words is a command in a group, such as `mcore-rl data tokenizer`."""
