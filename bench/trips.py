"""The way of a reader through one rollout batch of reinforcement learning: files, functions, changes of file.

    python -m bench.trips [--list]                seconds on one core; --list names every file with its calls
    python -m bench.trips --epochs 2              the second epoch imposes the routes of the pass for old logprobs
    python -m bench.trips --replay r3             passes and updates impose the engine's routes

One rank trains the tiny_moe recipe (an untrained model, a tokenizer made here) with routing replay, a KL penalty and,
with one epoch, one update a rollout batch. The third rollout batch is traced with `sys.setprofile`: by then nothing is
built, imported or cached any more. Only functions of files under `mcore_rl` count, a comprehension as a part of its
function; a change of file is a call, direct or through other libraries, from a function in one of these files to a
function in another. The layers are torch's, as on a GPU without TransformerEngine.
"""

import argparse
import json
import os
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; the machine may be shared

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import mcore_rl
from mcore_rl.programs import rl
from mcore_rl.rl.trainer import RlTrainer

PACKAGE = Path(mcore_rl.__file__).parent
RECIPE = PACKAGE.parent / "launch" / "recipes" / "tiny_moe" / "grpo.toml"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
BATCHES = 3
"""Rollout batches that are made; the last one is traced."""


class Trips:
    """Counts calls between the files of `mcore_rl` while it is active."""

    def __init__(self) -> None:
        self.functions: Counter[CodeType] = Counter()
        """Calls of each function."""
        self.changes: Counter[tuple[str, str]] = Counter()
        """Calls from one file to another, as (caller, callee)."""
        self._stack: list[str] = []
        self._names: dict[str, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count the calls of this thread inside."""
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> Counter[str]:
        """Calls of the functions of each file."""
        files: Counter[str] = Counter()
        for code, calls in self.functions.items():
            files[self._file(code)] += calls
        return files

    def _file(self, code: CodeType) -> str:
        """Path below the package, or "" for a function of another library."""
        name = code.co_filename
        if name not in self._names:
            inside = name.startswith(f"{PACKAGE}{os.sep}")
            self._names[name] = str(Path(name).relative_to(PACKAGE)) if inside else ""
        return self._names[name]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        file = self._file(frame.f_code)
        if not file or frame.f_code.co_name in COMPREHENSIONS:
            return
        if event == "return":
            # The function that switched the profile on returns without having been called.
            if self._stack:
                self._stack.pop()
            return
        self.functions[frame.f_code] += 1
        if self._stack and self._stack[-1] != file:
            self.changes[self._stack[-1], file] += 1
        self._stack.append(file)


def trace(folder: Path, replay: str, epochs: int) -> Trips:
    """Run the training in this process, in `folder`, and trace its last rollout batch.

    Args:
        folder: New folder of the run and its tokenizer.
        replay: Routes that are replayed, `r2` or `r3`.
        epochs: Updates of each rollout batch.
    """
    write_tokenizer(folder / "tokenizer")
    trips, step = Trips(), RlTrainer._step

    def traced(self: RlTrainer) -> None:
        if self.state.progress.step < epochs * (BATCHES - 1):
            step(self)
            return
        with trips.active():
            step(self)

    RlTrainer._step = traced  # type: ignore[method-assign]
    overrides = {
        "run_dir": str(folder / "run"),
        "mesh.tp": 1,
        "mesh.ep": 1,
        "data.tokenizer.kind": "huggingface",
        "data.tokenizer.path": str(folder / "tokenizer"),
        "checkpoint.load": "none",
        "checkpoint.interval": "none",
        "train.steps": epochs * BATCHES,
        "train.global_batch": 16,
        "train.eval_interval": "none",
        "optim.warmup_steps": 0,
        "rl.rollout.prompts_per_step": 4,
        "rl.rollout.group_size": 4,
        "rl.samples.interval": "none",
        "rl.loss.kl_coeff": 0.001,
        "rl.update.epochs": epochs,
        "replay.kind": replay,
        "platform.layers": "torch",
    }
    assert rl.main([str(RECIPE), *(f"{name}={value}" for name, value in overrides.items())]) == 0
    return trips


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character."""
    folder.mkdir(parents=True)
    characters = ["<end>", *string.printable]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def main(words: Sequence[str] | None = None) -> None:
    """Print the three numbers and, with `--list`, the calls of each file and each change."""
    parser = argparse.ArgumentParser(description="how far a reader travels through one rollout batch")
    parser.add_argument("--list", action="store_true", help="name every file and the commonest changes")
    parser.add_argument("--replay", choices=("r2", "r3"), default="r2")
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        trips = trace(Path(folder), arguments.replay, arguments.epochs)
    print(f"files:           {len(trips.files):6,}")
    print(f"functions:       {len(trips.functions):6,}")
    print(f"changes of file: {trips.changes.total():6,}")
    if arguments.list:
        for file, calls in sorted(trips.files.items()):
            own = sorted(code.co_qualname for code in trips.functions if code.co_filename.endswith(f"/{file}"))
            print(f"{calls:7,} calls  {file}: {', '.join(own)}")
        for (caller, callee), calls in trips.changes.most_common():
            print(f"{calls:7,} changes  {caller} -> {callee}")


if __name__ == "__main__":
    main()
