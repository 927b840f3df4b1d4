"""`mcore-rl plan FOLDER --gpus 8xH100`: whether a training of a model fits on GPUs, and with which mesh."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.checks.programs import PROGRAMS, Program
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planning.gpus import Gpus
from mcore_rl.planning.meshes import toml_lines
from mcore_rl.planning.place import place_of
from mcore_rl.planning.search import Search, search
from mcore_rl.planning.text import choice_text, search_lines
from mcore_rl.planning.weights import weights_by_stage
from mcore_rl.storage.folders import find_model, read_model_folder
from mcore_rl.storage.run_config import load_run_config

LARGEST = 4096
"""Largest number of GPUs to try."""


def fit(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> int:
    """Print in one line whether training `kind` of the model in `folder` fits on the GPUs, and then how.

    Raises:
        ConfigError: it does not fit; with the smallest number of GPUs that it fits on.
    """
    found = _tried(folder, gpus, kind, overrides)
    training, shown = found.training, found.shortlist()
    name = f"{folder.resolve().name}, {size_of(training.model)}: "
    what = f"{kind} in {training.platform.precision} with sequences of {training.seq_length:,} tokens"
    if shown:
        fits = choice_text(shown[0], shown[0], found.place)
        sys.stdout.write(f"{name}yes, {what} fits on {gpus} ({fits})\n")
        fields = [f"model.path={folder}", "platform.precision=bf16", "mesh.dp=auto"]
        fields += [*toml_lines(found.changes(shown[0])), *overrides]
        sys.stdout.write(f"mcore-rl {kind} CONFIG {shlex.join(fields)}\n\n")
        sys.stdout.write("".join(f"{line}\n" for line in search_lines(found, shown)))
        return 0
    larger = gpus
    while not shown and larger.count < LARGEST:
        larger = Gpus(larger.count * 2, gpus.device)
        found = _tried(folder, larger, kind, overrides)
        shown = found.shortlist()
    if not shown:
        # Raises if the fields are refused with any mesh.
        PROGRAMS[kind].check(_config(folder, larger, kind, overrides), larger.count)
    remedy = f"It does not on {LARGEST} either: shorten the sequences, or choose larger GPUs."
    if shown:
        remedy = f"It does on {larger} ({choice_text(shown[0], shown[0], found.place)})."
    raise ConfigError(f"{name}no, {what} does not fit on {gpus}. {remedy}")


def fitting_fields(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the fastest mesh on which training the model fits; ConfigError if it fits on none."""
    found = _tried(folder, gpus, kind, overrides)
    shown = found.shortlist()
    if not shown:
        raise ConfigError(
            f"`mcore-rl plan {folder} --gpus {gpus.count}x{gpus.device} --program {kind}` says why not."
        )
    return found.changes(shown[0])


def _tried(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> Search:
    """Return the meshes that fit on the GPUs."""
    place = place_of(gpus.cluster())
    return search(_config(folder, gpus, kind, overrides), gpus.count, place)


def _config(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> RunConfig:
    """Return the config of a training of which only the model, the GPUs and the overrides are known."""
    program = PROGRAMS[kind]
    max_position = read_model_folder(find_model(str(folder), "FOLDER")).model.max_position
    fields = [*_usual(program, folder, gpus, max_position), *overrides]
    return load_run_config(program.config, None, fields)


def _usual(program: Program, folder: Path, gpus: Gpus, max_position: int) -> Iterator[str]:
    """Yield the fields of a training run for which only the model is known; the answer depends only on these fields."""
    yield from ("platform.precision=bf16", "mesh.dp=auto", f"model.path={folder}", "checkpoint.load=none")
    # File names for the checks; the files are not read.
    yield from ("data.tokenizer.kind=huggingface", f"data.tokenizer.path={folder}")
    # At least as many sequences as ranks, so that no mesh is refused because it cannot divide the batch.
    if program is PROGRAMS["rl"]:
        prompts, most = max(16, gpus.count // 8), min(1024, max_position // 2)
        yield from (f"rl.prompts.max_tokens={most}", f"rl.rollout.max_new_tokens={most}")
        yield from (
            "rl.prompts.files=prompts",
            f"rl.rollout.prompts_per_step={prompts}",
            "rl.rollout.group_size=8",
        )
        yield f"train.global_batch={8 * prompts}"
    else:
        yield f"data.seq_length={min(1024, max_position)}"
        yield from ("data.train=data", f"train.global_batch={max(8, gpus.count)}")
    if program is PROGRAMS["rm"]:
        yield "model.head=score"


def size_of(model: ModelConfig) -> str:
    """Return the number of parameters and, for a mixture of experts, of parameters active per token, as text."""
    (weights,) = weights_by_stage(model, MeshConfig())
    text = f"{weights.total / 1e9:.3g} B parameters"
    if model.is_moe:
        active = weights.dense + weights.expert * model.moe.top_k // model.moe.num_experts
        text += f", {active / 1e9:.3g} B at work for a token"
    return text
