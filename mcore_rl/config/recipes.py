"""Recipes and clusters by name: `tiny_moe/grpo` is launch/recipes/tiny_moe/grpo.toml."""

import argparse
import difflib
import os
import tomllib
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.storage.files import shipped

RECIPES = shipped("recipes")
CLUSTERS = shipped("clusters")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that can be run as it is."""

    name: str
    """Name that a command takes for CONFIG, such as tiny_moe/grpo."""
    summary: str
    """First sentence of the comment at the top of the file."""


def config_file(path: Path, folder: Path = RECIPES) -> Path:
    """Return the file that CONFIG means, a file or a recipe; ConfigError with the most similar if there is none."""
    if os.path.exists(path):
        return path
    if path.suffix == ".toml":
        return _packaged(path, folder) or path
    files = recipe_files(folder)
    if str(path) in files:
        return files[str(path)]
    # `grpo` is short for `tiny_moe/grpo`.
    same_end = [other for other in files if other.rpartition("/")[2] == str(path).rpartition("/")[2]]
    near = list(dict.fromkeys([*difflib.get_close_matches(str(path), files, n=3), *same_end]))[:3]
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"There is no file {path}, and no recipe of that name. {remedy}`mcore-rl recipes` lists them.")


def extended_file(base: str, file: Path) -> Path:
    """Return the file of `extends = "base"` in `file`: relative to it, a recipe, or a cluster; else ConfigError."""
    path = file.parent / base
    if os.path.exists(path):
        return path
    folder = CLUSTERS if base in recipe_files(CLUSTERS) else RECIPES
    if path.suffix == ".toml":
        return _packaged(Path(base), folder) or path
    try:
        return config_file(Path(base), folder)
    except ConfigError as error:
        raise ConfigError(f'extends = "{base}" in {file}: {error}') from None


def cluster_file(text: str) -> Path:
    """Return the file or example of --cluster; argparse.ArgumentTypeError, with all examples, if there is none."""
    path = Path(text)
    if os.path.exists(path):
        return path
    if path.suffix == ".toml":
        return _packaged(path, CLUSTERS) or path
    files = recipe_files(CLUSTERS)
    if text not in files:
        raise argparse.ArgumentTypeError(
            f"there is no file {text}, and no example of that name: {', '.join(files)}. Copy one of {CLUSTERS} into a "
            "file of your own, and name that"
        )
    return files[text]


def recipe_files(folder: Path = RECIPES) -> dict[str, Path]:
    """Return name -> file of every recipe in `folder`, including bases that recipes extend."""
    files = sorted(folder.rglob("*.toml"))
    return {str(file.relative_to(folder).with_suffix("")): file for file in files}


def recipes(folder: Path = RECIPES) -> list[Recipe]:
    """Return the recipes in `folder` that can run as they are, with a run_dir; the rest are bases to extend."""
    found = []
    for name, file in recipe_files(folder).items():
        text = file.read_text(encoding="utf-8")
        if "run_dir" in tomllib.loads(text):
            comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
            sentence, stop, _ = " ".join(line.removeprefix("#").strip() for line in comment).partition(". ")
            found.append(Recipe(name, sentence + stop.strip()))
    return found


def _packaged(path: Path, folder: Path) -> Path | None:
    """Return the shipped file for a path in the repository, such as launch/recipes/tiny_moe/grpo.toml, or None."""
    is_shipped = path.parts[:2] == ("launch", folder.name)
    return recipe_files(folder).get(str(Path(*path.parts[2:]).with_suffix(""))) if is_shipped else None
