"""All that this project is for, on this machine, with nothing downloaded: pretraining, conversion, fine-tuning,
reinforcement learning with and without routing replay, evaluation, and one page about it.

The corpus is the source text of this Python's standard library, the task to reverse digits. The demonstrations of
fine-tuning share a bad habit: in most of them the last digit is forgotten. The model learns the habit too, and
unlearns it by rewards. Each stage is a command that a user would give; it is skipped where its result is there already,
so that a second start resumes where the first one ended, also after Ctrl-C.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RECIPES = "tiny_moe"
VOCAB_SIZE = 2048
STEPS = 100
CLI = ("-m", "mcore_rl.cli.cli")
EXAMPLE = """example:
  python tools/quickstart.py --steps 300
  python tools/quickstart.py --only pretrain
  python tools/quickstart.py --folder runs/mine train.seed=2 platform.layers=torch"""
CUT_FRACTION = 0.65
"""Fraction of the demonstrations in which the last digit of the answer is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One command of this Python, and the file that shows that it has run."""

    name: str
    """Stages of one name belong together: `--only` runs them."""
    title: str
    arguments: tuple[object, ...]
    result: Path
    seconds: float
    """It took on two cores, with the default number of steps: to tell how long is left."""
    keep_output: bool = False
    """Its last line becomes the result."""
    sources: tuple[Path, ...] = ()
    """Files that the result must not be older than."""

    @property
    def is_done(self) -> bool:
        """True when the result exists and is not older than its sources."""
        if not self.result.exists():
            return False
        made = self.result.stat().st_mtime
        return all(source.stat().st_mtime <= made for source in self.sources if source.exists())

    def run(self) -> None:
        """CalledProcessError when the command fails."""
        output = run_to_end([sys.executable, *map(str, self.arguments)], keep_output=self.keep_output)
        if self.keep_output:
            self.result.parent.mkdir(parents=True, exist_ok=True)
            self.result.write_text(output.strip().splitlines()[-1] + "\n", encoding="utf-8")


def run_to_end(command: Sequence[str], *, keep_output: bool) -> str:
    """Run a command and wait for its end also after Ctrl-C, which it gets too, and SIGTERM, which is passed on to it: a
    training saves then. CalledProcessError when it fails.
    """
    is_ended = False

    def end(*_: object) -> None:
        nonlocal is_ended
        is_ended = True
        process.terminate()

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE if keep_output else None, text=True) as process:
        before = signal.signal(signal.SIGTERM, end)
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if is_ended:
        os.kill(os.getpid(), signal.SIGTERM)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output or ""


ARMS = ("grpo_r2", "gspo")
MORE_ARMS = ("ppo",)
"""Arms of reinforcement learning that are run, and those that `--arm` adds."""


def stages(folder: Path, steps: int, more_arms: Sequence[str] = (), settings: Sequence[str] = ()) -> list[Stage]:
    """Return the stages, of `steps` steps or in proportion; `more_arms` of MORE_ARMS, `settings` for all runs."""
    arms = (*ARMS, *more_arms)
    return [
        *_pretraining(folder, steps, settings),
        *_conversion(folder),
        *_learning(folder, steps, arms, settings),
        *_reporting(folder, steps, arms, settings),
    ]


def _pretraining(folder: Path, steps: int, shared: Sequence[str]) -> list[Stage]:
    text, data, tokenizer = folder / "text", folder / "data", folder / "tokenizer.model"
    corpus = ("tools/python_corpus.py", "--output", text, "--max-mb", min(6, 1 + steps // 10))
    learn = ("tools/train_tokenizer.py", text / "train.jsonl", "--output", tokenizer, "--vocab-size", VOCAB_SIZE)
    made = [
        Stage(
            name="data",
            title="text of the Python standard library",
            arguments=corpus,
            result=text / "valid.jsonl",
            seconds=3,
        ),
        Stage(name="data", title="sentencepiece tokenizer", arguments=learn, result=tokenizer, seconds=10),
    ]
    for name in ("train", "valid"):
        arguments = ("tools/preprocess.py", text / f"{name}.jsonl", "--output", data / name, "--tokenizer", tokenizer)
        result = (data / name).with_suffix(".idx")
        made.append(
            Stage(
                name="data",
                title=f"{name} tokens",
                arguments=(*arguments, "--workers", min(2, os.cpu_count() or 1)),
                result=result,
                seconds=4,
            )
        )
    run_dir = folder / "pretrain"
    settings = (
        f"run_dir={run_dir}",
        f"data.train=['{data / 'train'}']",
        f"data.valid=['{data / 'valid'}']",
        "data.tokenizer.kind=sentencepiece",
        f"data.tokenizer.path={tokenizer}",
        *_lasting(steps, warmup=10),
        f"train.eval_interval={max(1, steps // 4)}",
        *shared,
    )
    title = "pretraining a tiny MoE on 2 ranks (TP2 x EP2)"
    arguments = (*CLI, "pretrain", f"{RECIPES}/pretrain", *settings)
    return [*made, Stage(name="pretrain", title=title, arguments=arguments, result=run_dir / "DONE", seconds=45)]


def _conversion(folder: Path) -> list[Stage]:
    checkpoint, hf, imported = folder / "pretrain", folder / "hf", folder / "imported"
    return [
        Stage(
            name="convert",
            title="export to Hugging Face",
            arguments=(*CLI, "convert", "export", checkpoint, hf),
            result=hf / "config.json",
            seconds=4,
        ),
        Stage(
            name="convert",
            title="the same logits in transformers",
            arguments=(*CLI, "convert", "verify", checkpoint, hf, "--logits"),
            result=folder / "logits.txt",
            seconds=10,
            keep_output=True,
        ),
        Stage(
            name="convert",
            title="import from Hugging Face",
            arguments=(*CLI, "convert", "import", hf, imported),
            result=imported / "latest_checkpointed_iteration.txt",
            seconds=4,
        ),
    ]


def _learning(folder: Path, steps: int, names: Sequence[str], shared: Sequence[str]) -> list[Stage]:
    problems, sft = folder / "chat.jsonl", folder / "sft"
    tokenizer = f"data.tokenizer.path={folder / 'tokenizer.model'}"
    made = [
        Stage(
            name="sft",
            title="problems to fine-tune on, most answers cut short",
            arguments=(
                *(*CLI, "problems", f"{RECIPES}/grpo", *shared),
                *("--cut-fraction", CUT_FRACTION, "--count", 20000, "--output", problems),
            ),
            result=problems,
            seconds=3,
        ),
        Stage(
            name="sft",
            title="fine-tuning on them on another mesh (PP2)",
            arguments=(
                *(*CLI, "sft", f"{RECIPES}/sft", f"run_dir={sft}", f"data.train=['{problems}']", tokenizer),
                *("mesh.tp=1", "mesh.ep=1", "mesh.pp=2", f"checkpoint.load={folder / 'imported'}"),
                *_lasting(3 * steps, warmup=10),
                *shared,
            ),
            result=sft / "DONE",
            seconds=55,
        ),
    ]
    # The recipe's three rollout batches in which the critic alone learns, or fewer of a very short run.
    warmup = f"rl.advantage.critic.warmup_rollouts={min(3, _even(1.2 * steps) // 8)}"
    arms = {
        "grpo_r2": ("GRPO with routing replay (TP2 x EP2)", "grpo", ("replay.kind=r2",)),
        "gspo": ("GSPO without, from the same start", "gspo", ()),
        "ppo": ("PPO with a critic and routing replay, from the same start", "ppo", (warmup,)),
    }
    for name in names:
        title, recipe, own = arms[name]
        settings = (f"run_dir={folder / name}", f"checkpoint.load={sft}", tokenizer, *own)
        lasting = _lasting(_even(1.2 * steps), warmup=4)
        arguments = (*CLI, "rl", f"{RECIPES}/{recipe}", *settings, *lasting, *shared)
        made.append(Stage(name=name, title=title, arguments=arguments, result=folder / name / "DONE", seconds=50))
    return made


def _reporting(folder: Path, steps: int, arms: Sequence[str], shared: Sequence[str]) -> list[Stage]:
    names = ("pretrain", "sft", *arms)
    made = []
    for name in names:
        arguments = (
            *(*CLI, "eval", f"{RECIPES}/grpo", f"run_dir={folder / 'no_run'}", "mesh.tp=1", "mesh.ep=1"),
            f"data.tokenizer.path={folder / 'tokenizer.model'}",
            *(f"checkpoint.load={folder / name}", f"rl.eval.num_prompts={min(256, 4 * steps)}"),
            *("rl.eval.temperature=1.0", "rl.eval.samples=4"),
            *shared,
        )
        result = folder / name / "evaluation.json"  # where the report looks
        made.append(
            Stage(
                name="eval",
                title=f"answers of {name} to held-out prompts",
                arguments=arguments,
                result=result,
                seconds=7,
                keep_output=True,
            )
        )
    runs = [folder / name for name in names]
    page = folder / "report.html"
    arguments = (*CLI, "report", *runs, "--output", page)
    evaluated = tuple(stage.result for stage in made)
    title = "one page about it"
    return [*made, Stage(name="report", title=title, arguments=arguments, result=page, seconds=4, sources=evaluated)]


def _lasting(steps: int, warmup: int) -> tuple[str, str]:
    return f"train.steps={steps}", f"optim.warmup_steps={min(warmup, steps // 4)}"


def _even(steps: float) -> int:
    """Two optimizer steps a rollout batch, evaluated every twenty: at least one batch."""
    return max(2, 2 * round(steps / 2))


def run_all(chosen: Sequence[Stage], console: Console, scale: float) -> None:
    """Run the stages that are not done yet; CalledProcessError when a command fails."""
    expected_s = spent_s = 0.0
    for number, stage in enumerate(chosen, start=1):
        title = f"[bold]{number}/{len(chosen)} {stage.title}[/]"
        if stage.is_done:
            console.print(f"{title}: done before ({stage.result})", soft_wrap=True)
            continue
        pace = spent_s / expected_s if expected_s > 10 else scale
        left_s = pace * sum(later.seconds for later in chosen[number - 1 :] if not later.is_done)
        console.print(f"{title}, about {timedelta(seconds=round(left_s))} left in all", soft_wrap=True)
        console.print(f"[dim]$ python {shlex.join(map(str, stage.arguments))}[/]", soft_wrap=True)
        started_s = time.monotonic()
        stage.run()
        spent_s += time.monotonic() - started_s
        expected_s += stage.seconds


def run_to_status(chosen: Sequence[Stage], console: Console, scale: float) -> int:
    """Run the stages that are not done yet and return the exit status: 0, 1 after a failure, 130 after Ctrl-C."""
    try:
        run_all(chosen, console, scale)
    except subprocess.CalledProcessError as error:
        console.print(f"[red]stopped[/]: the command above ended with status {error.returncode}")
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped; the same command resumes from here")
        return 130
    return 0


def summary(folder: Path, took_s: float, console: Console) -> None:
    """Print the results and where they are."""
    last: dict[str, float] = {}
    for line in (folder / "pretrain" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        last |= {key: value for key, value in json.loads(line).items() if isinstance(value, int | float)}
    console.print(
        f"\n[bold]done in {took_s:.0f} s[/]: held-out loss {last['eval/loss_nats']:.3f} nats a token, against "
        f"{last['data/unigram_nats']:.3f} of the token frequencies alone",
        soft_wrap=True,
    )
    for path in sorted(folder.glob("*/evaluation.json"), key=lambda path: path.stat().st_mtime):
        evaluation = json.loads(path.read_text(encoding="utf-8"))
        console.print(f"  {path.parent.name:<9} answers {evaluation['eval/accuracy']:6.1%} of held-out prompts right")
    console.print(f"  the page  {folder / 'report.html'}", soft_wrap=True)
    console.print(what_next(folder), soft_wrap=True, markup=False, highlight=False)


def what_next(folder: Path) -> str:
    """Return three commands to try on the results, after the line that puts `mcore-rl` on the PATH, if needed."""
    here = Path(sys.executable).parent
    found = shutil.which("mcore-rl")
    is_on_path = found is not None and Path(found).parent == here
    runs = os.path.relpath(folder)
    commands = [
        *([] if is_on_path else [f"source {os.path.relpath(here)}/activate    # puts mcore-rl on the PATH"]),
        f"mcore-rl generate {runs}/grpo_r2 12345= --chat",
        f"mcore-rl eval {runs}/grpo_r2 rl.eval.samples=4 rl.eval.temperature=1",
        f"mcore-rl rl tiny_moe/cispo checkpoint.load={runs}/sft run_dir={runs}/cispo",
    ]
    return "\n".join(["try next", *(f"  {command}" for command in commands)])


def main() -> int:
    """Parse, run the stages, print where the results are."""
    command = argparse.ArgumentParser(
        prog="tools/quickstart.py",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--folder", type=Path, default=Path("runs/quickstart"), help="for all results")
    command.add_argument(
        "--steps", type=int, default=int(os.environ.get("STEPS", STEPS)), help="of pretraining; others grow with it"
    )
    names = list(dict.fromkeys(stage.name for stage in stages(Path(), STEPS, MORE_ARMS)))
    command.add_argument(
        "--only", action="append", choices=names, default=[], help="this part alone, on what the others have left"
    )
    command.add_argument(
        "--arm",
        action="append",
        choices=MORE_ARMS,
        default=[],
        help="adds an arm of reinforcement learning; make quickstart ARM=ppo",
    )
    command.add_argument(
        "settings", nargs="*", metavar="OVERRIDE", help="fields of every training and evaluation of it"
    )
    args = command.parse_args()
    console = Console()
    folder = ROOT / args.folder
    started_s = time.monotonic()
    more = (*args.arm, *(name for name in args.only if name in MORE_ARMS))
    chosen = [
        stage
        for stage in stages(folder, args.steps, tuple(dict.fromkeys(more)), args.settings)
        if not args.only or stage.name in args.only
    ]
    if status := run_to_status(chosen, console, max(0.3, args.steps / STEPS)):
        return status
    if not args.only:
        summary(folder, time.monotonic() - started_s, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
