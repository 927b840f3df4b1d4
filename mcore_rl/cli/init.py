"""`mcore-rl init FOLDER`: a short config for training a model, on the given GPUs or on this machine.

With --from, it translates the config of another system.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.fit import fitting_fields, size_of
from mcore_rl.cli.foreign import translated
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import LARGEST_NODE, known_device
from mcore_rl.planning.gpus import Gpus, parse_gpus
from mcore_rl.storage.folders import find_model
from mcore_rl.storage.run_config import load_run_config

GROUP_SIZE = 8
Line = tuple[str, Any, str]
"""Field, value, and comment."""


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
    if kind == "rm":
        lines.append(("model.head", "score", "one number for a sequence"))
    lines += [
        ("platform.precision", "bf16" if gpus else "fp32", ""),
        ("mesh.dp", "auto", "what the ranks leave"),
    ]
    rest = [
        *_data(kind, config.model.max_position),
        *(_rl(config.model, ranks) if kind == "rl" else _steps(kind, ranks)),
    ]
    if gpus is not None:
        fields = fitting_fields(folder, gpus, kind, [f"{key}={toml_value(value)}" for key, value, _ in rest])
        lines += [(key, value, "") for key, value in fields.items()]
    lines += rest
    lines.append(("checkpoint.interval", 50, "steps between two checkpoints"))
    sys.stdout.write(
        f"# {kind} of {name}, {size_of(config.model)}, for {place}: mcore-rl {kind} THIS_FILE --ranks {ranks}\n"
    )
    for key, value, comment in lines:
        sys.stdout.write(f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else "") + "\n")
    return 0


def _data(kind: str, max_position: int) -> Iterator[Line]:
    if kind == "rl":
        most = min(512, max_position // 2)
        yield (
            "rl.prompts.files",
            ["data/prompts.jsonl"],
            'lines with "question" and "answer", or another known shape',
        )
        yield "rl.prompts.max_tokens", most, ""
        yield "rl.rollout.max_new_tokens", most, ""
        yield "rl.eval.files", ["data/held_out.jsonl"], "prompts that are never trained on"
        return
    read = {
        "pretrain": ("data/text", "prefix of the .bin/.idx pair that `mcore-rl data preprocess` writes"),
        "sft": ("data/chat.jsonl", 'lines with "messages", or "prompt" and "response"'),
    }
    path, comment = read.get(kind, ("data/pairs.jsonl", 'lines with "prompt", "chosen" and "rejected"'))
    yield "data.train", [path], comment
    yield "data.seq_length", min(1024, max_position), "tokens of a sequence"


def _steps(kind: str, ranks: int) -> Iterator[Line]:
    yield "train.steps", 300, ""
    yield "train.global_batch", max(16, ranks), "sequences of a step, over all ranks"
    yield "optim.lr", 5e-7 if kind == "dpo" else 1e-5, ""
    yield "optim.warmup_steps", 20, ""


def _rl(model: ModelConfig, ranks: int) -> Iterator[Line]:
    prompts = max(16, ranks // GROUP_SIZE)
    yield "rl.rollout.prompts_per_step", prompts, ""
    yield (
        "rl.rollout.group_size",
        GROUP_SIZE,
        "completions of a prompt; advantages are relative to their mean",
    )
    yield (
        "rl.reward.parts",
        ["numeric"],
        "1 where the last number is the answer's; or math, exact, module:function",
    )
    if model.is_moe:
        yield "replay.kind", "r2", "updates use the experts that the old policy chose"
    yield "train.steps", 100, ""
    yield "train.global_batch", GROUP_SIZE * prompts, "completions of a step: one step for each rollout batch"
    yield "train.eval_interval", 10, ""
    yield "optim.lr", 1e-6, ""
    yield "optim.schedule", "constant", ""


def _gpus_here() -> Gpus | None:
    """Return the GPUs of this machine; None if it has none, or if their memory is unknown."""
    import torch  # takes a second or two, which other commands need not wait for

    if not torch.cuda.is_available():
        return None
    device = known_device(torch.cuda.get_device_name(0))
    if device is None or device.memory_gib is None:
        return None
    return Gpus(min(torch.cuda.device_count(), LARGEST_NODE), device.name)
