"""`mcore-rl init`: a short config for a model on the given GPUs or on this machine, or from another system's config.

It also answers `mcore-rl plan FOLDER --gpus 8xH100`: whether a training of a model fits on GPUs, and with which mesh.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.checks.inputs import absent_template
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.migrate import translated
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import LARGEST_NODE, Gpus, known_device, parse_gpus
from mcore_rl.planning.estimate import place_of
from mcore_rl.planning.search import Search, search, toml_lines
from mcore_rl.planning.text import batch_text, search_lines, wrapped, yes_line
from mcore_rl.planning.weights import weights_by_stage
from mcore_rl.storage.folders import find_model, read_model_folder
from mcore_rl.storage.run_config import load_run_config

GROUP_SIZE = 8
HELD_OUT = 64
"""Largest number of lines that are held out for evaluation."""
Line = tuple[str, Any, str]
"""Field, value, and comment."""
LARGEST = 4096
"""Largest number of GPUs to try."""


def main(args: argparse.Namespace) -> int:
    """Print the config. Raises ConfigError if the folder has no model, or if nothing fits on the GPUs."""
    if args.source is not None:
        sys.stdout.write(translated(args.source, args.program, args.folder))
        return 0
    if args.folder is None:
        raise ConfigError("Give FOLDER, a model, or --from FILE, a config of another system.")
    kind, folder = args.program or "sft", find_model(args.folder, "FOLDER")
    gpus = parse_gpus(args.gpus) if args.gpus else _gpus_here()
    head = ["model.head=score"] if kind == "rm" else []
    config = load_run_config(PROGRAMS[kind].config, None, [f"model.path={args.folder}", *head])
    name, ranks = folder.resolve().name, gpus.count if gpus else 1
    place = f"{gpus}" if gpus else "one rank on a CPU"
    lines: list[Line] = [
        ("run_dir", f"runs/{name}_{kind}", "everything that the run writes"),
        ("model.path", args.folder, "model, tokenizer, chat template and weights"),
    ]
    if kind != "pretrain" and any(absent_template(config)):
        lines.append(("data.chat_template", "plain", 'there is none in the model\'s folder; or "raw", or a jinja file'))
    if kind == "rm":
        lines.append(("model.head", "score", "one number for a sequence"))
    lines += [("platform.precision", "bf16" if gpus else "fp32", ""), ("mesh.dp", "auto", "what the ranks leave")]
    rest = [
        *_data(kind, config.model.max_position, args.data),
        *(_rl(config.model, ranks, args.reward or "numeric") if kind == "rl" else _steps(kind, ranks)),
    ]
    if gpus is not None:
        found = _tried(folder, gpus, kind, [f"{key}={toml_value(value)}" for key, value, _ in rest])
        if not (shown := found.shortlist()):
            raise ConfigError(
                f"`mcore-rl plan {folder} --gpus {gpus.count}x{gpus.device} --program {kind}` says why not."
            )
        lines += [(key, value, "") for key, value in found.changes(shown[0]).items()]
    lines += rest
    lines.append(("checkpoint.interval", 50, "steps between two checkpoints"))
    sys.stdout.write(
        f"# {kind} of {name}, {size_of(config.model)}, for {place}: mcore-rl {kind} THIS_FILE --ranks {ranks}\n"
    )
    for key, value, comment in lines:
        sys.stdout.write(f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else "") + "\n")
    return 0


def _data(kind: str, max_position: int, data: Path | None) -> Iterator[Line]:
    kept, held_out = _split(data) if data and kind != "pretrain" else ([str(data)] if data else [], [])
    if kind == "rl":
        most = min(512, max_position // 2)
        shapes = 'lines with "question" and "answer", or another known shape'
        yield "rl.prompts.files", kept or ["data/prompts.jsonl"], shapes
        yield "rl.prompts.max_tokens", most, ""
        yield "rl.rollout.max_new_tokens", most, ""
        if held_out or not data:
            yield "rl.eval.files", held_out or ["data/held_out.jsonl"], "prompts that are never trained on"
            yield "train.eval_interval", 10, ""
        return
    read = {
        "pretrain": ("data/text", "prefix of the .bin/.idx pair that `mcore-rl data preprocess` writes"),
        "sft": ("data/chat.jsonl", 'lines with "messages", or "prompt" and "response"'),
    }
    path, comment = read.get(kind, ("data/pairs.jsonl", 'lines with "prompt", "chosen" and "rejected"'))
    yield "data.train", kept or [path], comment
    if held_out:
        yield "data.valid", held_out, "lines that are never trained on"
    yield "data.seq_length", min(1024, max_position), "tokens of a sequence"


def _split(data: Path) -> tuple[list[str], list[str]]:
    """Write every 20th line of a file of JSON lines, 64 at most, and the other lines, to two files beside it, and
    return their names. Any other file is not split.
    """
    if data.suffix != ".jsonl" or not data.is_file():
        return [str(data)], []
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = set(range(19, len(lines), 20)[:HELD_OUT])
    if not held_out:
        return [str(data)], []
    names = [data.with_suffix(".train.jsonl"), data.with_suffix(".held_out.jsonl")]
    for name, is_held_out in zip(names, (False, True), strict=True):
        name.write_text("".join(line for i, line in enumerate(lines) if (i in held_out) is is_held_out), "utf-8")
    sys.stderr.write(f"{data} is split: {names[0]} and {names[1]}, {len(held_out)} of {len(lines)} lines\n")
    return [str(names[0])], [str(names[1])]


def _steps(kind: str, ranks: int) -> Iterator[Line]:
    yield "train.steps", 300, ""
    yield "train.global_batch", max(16, ranks), "sequences of a step, over all ranks"
    yield "optim.lr", 5e-7 if kind == "dpo" else 1e-5, ""
    yield "optim.warmup_steps", 20, ""


def _rl(model: ModelConfig, ranks: int, reward: str) -> Iterator[Line]:
    prompts = max(16, ranks // GROUP_SIZE)
    yield "rl.rollout.prompts_per_step", prompts, ""
    yield ("rl.rollout.group_size", GROUP_SIZE, "completions of a prompt; advantages are relative to their mean")
    yield (
        "rl.reward.parts",
        [reward],
        "numeric: 1 where the last number is the answer's; or math, exact, module:function",
    )
    if model.is_moe:
        yield "replay.kind", "r2", "updates use the experts that the old policy chose"
    yield "train.steps", 100, ""
    yield "train.global_batch", GROUP_SIZE * prompts, "completions of a step: one step for each rollout batch"
    yield "optim.lr", 1e-6, ""
    yield "optim.schedule", "constant", ""


def _gpus_here() -> Gpus | None:
    import torch  # takes a second or two, which other commands need not wait for

    if not torch.cuda.is_available():
        return None
    device = known_device(torch.cuda.get_device_name(0))
    if device is None or device.memory_gib is None:
        return None
    return Gpus(min(torch.cuda.device_count(), LARGEST_NODE), device.name)


def fit(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> int:
    """Print that a training fits on the GPUs, and how; else raise ConfigError with the smallest number that it fits."""
    found = _tried(folder, gpus, kind, overrides)
    training, shown = found.training, found.shortlist()
    name = f"{folder.resolve().name}, {size_of(training.model)}"
    what = f"{kind} in {training.platform.precision} with sequences of {training.seq_length:,} tokens"
    if shown:
        seconds, fields = shown[0].seconds, [f"model.path={folder}", "platform.precision=bf16", "mesh.dp=auto"]
        batch = "" if seconds is None else f", {seconds:.3g} s for a {batch_text(training)}"
        sys.stdout.write(yes_line(kind, training, found.place, shown[0].memory.total) + "\n")
        fields += [*toml_lines(found.changes(shown[0])), *overrides]
        sys.stdout.write(" \\\n    ".join([f"mcore-rl {kind} CONFIG", *map(shlex.quote, fields)]) + "\n")
        lines = wrapped(f"{name}: {what}{batch}."), "", *search_lines(found, shown)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 0
    sys.stdout.write(f"no: {kind} does not fit on {gpus}\n")
    largest = Gpus(LARGEST, gpus.device)
    if found.refused == found.tried:
        # A refusal in the same words on most GPUs is not of the mesh: no larger number need be searched.
        refusals = {_refusal(folder, number, kind, overrides) for number in (gpus, largest)}
        if len(refusals) == 1 and (refusal := refusals.pop()):
            raise ConfigError(refusal)
    larger = gpus
    while not shown and larger.count < LARGEST:
        larger = Gpus(larger.count * 2, gpus.device)
        found = _tried(folder, larger, kind, overrides)
        shown = found.shortlist()
    if not shown and (refusal := _refusal(folder, larger, kind, overrides)):
        raise ConfigError(refusal)
    remedy = f"It does not on {LARGEST} either: shorten the sequences, or choose larger GPUs."
    if shown:
        remedy = f"It fits on {larger}."
    raise ConfigError(f"{kind} does not fit on {gpus}. {remedy} This is {name}, {what}.")


def _tried(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> Search:
    place = place_of(gpus.cluster())
    return search(_config(folder, gpus, kind, overrides), gpus.count, place)


def _refusal(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> str:
    try:
        PROGRAMS[kind].check(_config(folder, gpus, kind, overrides), gpus.count)
    except ConfigError as error:
        return str(error)
    return ""


def _config(folder: Path, gpus: Gpus, kind: str, overrides: Sequence[str]) -> RunConfig:
    max_position = read_model_folder(find_model(str(folder), "FOLDER")).model.max_position
    fields = ["platform.precision=bf16", "mesh.dp=auto", f"model.path={folder}", "checkpoint.load=none"]
    # File names for the checks; the files are not read.
    fields += ["data.tokenizer.kind=huggingface", f"data.tokenizer.path={folder}"]
    # At least as many sequences as ranks, so that no mesh is refused because it cannot divide the batch.
    if kind == "rl":
        prompts, most = max(16, gpus.count // 8), min(1024, max_position // 2)
        fields += [f"rl.prompts.max_tokens={most}", f"rl.rollout.max_new_tokens={most}", "rl.prompts.files=prompts"]
        fields += [
            f"rl.rollout.prompts_per_step={prompts}",
            "rl.rollout.group_size=8",
            f"train.global_batch={8 * prompts}",
        ]
    else:
        fields += [f"data.seq_length={min(1024, max_position)}", "data.train=data"]
        fields += [f"train.global_batch={max(8, gpus.count)}"]
    if kind == "rm":
        fields.append("model.head=score")
    return load_run_config(PROGRAMS[kind].config, None, [*fields, *overrides])


def size_of(model: ModelConfig) -> str:
    """Return the number of parameters and, for a mixture of experts, of parameters active per token, as text."""
    (weights,) = weights_by_stage(model, MeshConfig())
    text = f"{weights.total / 1e9:.3g} B parameters"
    if model.is_moe:
        active = weights.dense + weights.expert * model.moe.top_k // model.moe.num_experts
        text += f", {active / 1e9:.3g} B at work for a token"
    return text
