"""Pretraining on this machine with nothing downloaded: text, tokenizer, data, a tiny MoE, and a look at it.

The corpus is the source text of this Python's standard library. Each stage is a command that a user would give;
a stage whose result is there already is skipped, so that a second start goes on where the first one ended.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "launch/recipes/tiny_moe/pretrain.toml"
VOCAB_SIZE = 2048
EXAMPLE = """example:
  python tools/quickstart.py --steps 300
  python tools/quickstart.py --folder runs/mine --fresh"""


class Quickstart:
    """The stages, in order, with their results under one folder."""

    def __init__(self, folder: Path, steps: int, console: Console) -> None:
        self.folder = folder
        self.steps = steps
        self.console = console
        self.run_dir = folder / "pretrain"
        self.tokenizer = folder / "tokenizer.model"

    def run(self) -> None:
        """All stages; CalledProcessError when a command fails."""
        text, data = self.folder / "text", self.folder / "data"
        train, valid = data / "train", data / "valid"
        corpus = ["tools/python_corpus.py", "--output", text, "--max-mb", 6]
        self.stage("1/6 text of the Python standard library", corpus, text / "valid.jsonl")
        learn = ["tools/train_tokenizer.py", text / "train.jsonl", "--output", self.tokenizer]
        self.stage("2/6 sentencepiece tokenizer", [*learn, "--vocab-size", VOCAB_SIZE], self.tokenizer)
        for name, prefix in (("train", train), ("valid", valid)):
            tokenize = ["tools/preprocess.py", text / f"{name}.jsonl", "--output", prefix]
            tokenize += ["--tokenizer", self.tokenizer, "--workers", min(2, os.cpu_count() or 1)]
            self.stage(f"3/6 {name} tokens", tokenize, prefix.with_suffix(".idx"))
        settings = [
            f"run_dir={self.run_dir}",
            f"data.train=['{train}']",
            f"data.valid=['{valid}']",
            "data.tokenizer.kind=sentencepiece",
            f"data.tokenizer.path={self.tokenizer}",
            f"model.vocab_size={VOCAB_SIZE}",
            f"train.steps={self.steps}",
            f"train.eval_interval={max(1, self.steps // 4)}",
        ]
        pretrain = ["-m", "mcore_rl.run.cli", "pretrain", RECIPE, *settings]
        self.stage("4/6 pretraining a tiny MoE on 2 ranks (TP2 x EP2)", pretrain, self.run_dir / "DONE")
        for prompt in ("def read_", "import os\n", "class "):
            generate = ["-m", "mcore_rl.run.cli", "generate", "--run", self.run_dir, "--prompt", prompt]
            self.stage("5/6 a few lines from it", [*generate, "--tokens", 48, "--temperature", 0.7], None)
        picture = ["-m", "mcore_rl.run.cli", "plot", self.run_dir]
        self.stage("6/6 picture of loss and expert load", picture, self.run_dir / "metrics.png")

    def stage(self, title: str, command: list[object], result: Path | None) -> None:
        """Run a command of this Python unless its result is there."""
        words = [str(word) for word in command]
        if result is not None and result.exists():
            self.console.print(f"[bold]{title}[/]: done before ({result})", soft_wrap=True)
            return
        self.console.print(f"[bold]{title}[/]\n[dim]$ python {shlex.join(words)}[/]", soft_wrap=True)
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)

    def summary(self, took_s: float) -> None:
        """What came out, and where."""
        last: dict[str, float] = {}
        for line in (self.run_dir / "metrics.jsonl").read_text().splitlines():
            last |= {key: value for key, value in json.loads(line).items() if isinstance(value, int | float)}
        self.console.print(
            f"\n[bold]done in {took_s:.0f} s[/]: held-out loss {last['eval/loss_nats']:.3f} nats a token, against "
            f"{last['data/unigram_nats']:.3f} of the token frequencies alone\n"
            f"  run         {self.run_dir}\n"
            f"  numbers     {self.run_dir / 'metrics.jsonl'}\n"
            f"  picture     {self.run_dir / 'metrics.png'}\n"
            f"  checkpoints {self.run_dir / 'checkpoints'}",
            soft_wrap=True,
        )


def main() -> int:
    """Parse, run all stages, tell where the results are."""
    command = argparse.ArgumentParser(
        prog="tools/quickstart.py",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--folder", type=Path, default=Path("runs/quickstart"), help="for all results")
    command.add_argument(
        "--steps", type=int, default=int(os.environ.get("STEPS", "150")), help="of pretraining"
    )
    command.add_argument("--fresh", action="store_true", help="delete earlier results first")
    args = command.parse_args()
    console = Console()
    folder = ROOT / args.folder
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    started_s = time.monotonic()
    quickstart = Quickstart(folder, args.steps, console)
    try:
        quickstart.run()
    except subprocess.CalledProcessError as error:
        console.print(f"[red]stopped[/]: the command above ended with status {error.returncode}")
        return 1
    quickstart.summary(time.monotonic() - started_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
