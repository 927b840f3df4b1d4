"""Every command of README and docs, given to a shell as it stands there, on models and numbers of steps that are small.

The pages of a group share a folder, in the order in which they are read: each goes on with what those before have left.
What needs a GPU or a cluster is marked on its page, which tests/unit/test_docs.py keeps true; tests/slurm covers jobs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conversion import saved
from tests.docs.warm import warm_commands
from tests.documented import GROUPS, ROOT, Command, commands
from tests.tokenizer_files import write_tokenizer

QUICKSTART_STEPS = 2
ALONE = "mesh.tp=1 mesh.ep=1"
SHORT = "train.steps=2 optim.warmup_steps=0"
EIGHT = "rl.rollout.prompts_per_step=2 rl.rollout.group_size=4"
SMALLER = {
    "mcore-rl pretrain": f"{SHORT} {ALONE}",
    "mcore-rl sft": f"{SHORT} {ALONE}",
    "mcore-rl rm": f"{SHORT} {ALONE} train.global_batch=8 train.eval_batches=1 train.eval_interval=none",
    "mcore-rl dpo": f"{SHORT} {ALONE} train.global_batch=8 data.train=runs/quickstart/pairs_valid.jsonl",
    "mcore-rl rl": f"{SHORT} {ALONE} {EIGHT} train.global_batch=4 train.eval_interval=none",
    "mcore-rl rl my.toml": f"{SHORT} {ALONE} {EIGHT} train.global_batch=8 train.eval_interval=none "
    "rl.rollout.max_new_tokens=64",
    "mcore-rl rl tiny_moe/ppo": f"{SHORT} {ALONE} {EIGHT} train.global_batch=4 train.eval_interval=none "
    "rl.advantage.critic.warmup_rollouts=0",
    "mcore-rl eval": f"rl.eval.num_prompts=8 {ALONE}",
    # A model of random weights ends no completion: as long as a recipe allows is a thousand tokens and more.
    "mcore-rl eval --model": f"rl.eval.num_prompts=8 {ALONE} rl.rollout.max_new_tokens=64",
    "mcore-rl eval tiny_moe/rm": ALONE,
    "mcore-rl study": "overrides=[train.global_batch=2,train.steps=4,optim.warmup_steps=0,train.eval_interval=none,"
    "mesh.tp=1,mesh.ep=1,rl.rollout.prompts_per_step=2,rl.rollout.group_size=4] "
    # Two of four: pages run each of them alone too.
    "\"arms={R2=['replay.kind=r2'],GSPO=['rl.loss.kind=gspo']}\"",
}
"""Words that are added, ALONE only where a page names no mesh: two ranks are two fresh Pythons, which take seconds. The
quickstart runs all but the last of these on two."""
QUICKER = {"--count 40000": "--count 400", "--count 20000": "--count 2000", "--valid 1000": "--valid 80", "1000": "800"}
"""Words of the pages -> quicker ones; the last is a vocabulary."""
VARIES = re.compile(r"\d[\d.e+-]*( [KMG]?i?B\b)?")
TIMEOUT_S = 600
WITH_PYTHON = """
import runpy, sys
_, sys.executable, *sys.argv = sys.argv
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a file, for which another executable is Python."""


@pytest.fixture(scope="session")
def warm() -> Iterator[Path]:
    """A folder with `mcore-rl`, and a `python` that runs it, which begin with torch and Megatron in memory."""
    # The address of a socket is short, which a folder of pytest need not be.
    with tempfile.TemporaryDirectory() as folder, warm_commands(Path(folder)) as commands:
        yield commands


@pytest.fixture(scope="session")
def quickstart(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart, a small one."""
    folder = tmp_path_factory.mktemp("quickstart")
    steps = ("--steps", str(QUICKSTART_STEPS))
    words = [str(warm / "python"), ROOT / "tools/quickstart.py", "--folder", folder, *steps]
    subprocess.run([sys.executable, "-c", WITH_PYTHON, *words], check=True)
    return folder


def test_quickstart_goes_from_text_to_a_report_and_does_nothing_twice(
    quickstart: Path, warm: Path, tmp_path: Path
) -> None:
    made = sorted(path.name for path in quickstart.glob("*/evaluation.json") if path.stat().st_size)
    assert len(made) == 4 and "<html" in (quickstart / "report.html").read_text()[:200]
    (logits,) = (quickstart / "logits.txt").read_text().splitlines()
    assert float(re.search(r"at most ([\d.e-]+)", logits)[1]) < 2e-5  # type: ignore[index]
    before = {path: path.stat().st_mtime_ns for path in quickstart.rglob("*") if path.is_file()}
    again = [sys.executable, ROOT / "tools/quickstart.py", "--folder", quickstart]
    done = subprocess.run(again, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.count("done before") == 17
    assert {path: path.stat().st_mtime_ns for path in quickstart.rglob("*") if path.is_file()} == before
    shown = done.stdout.partition("try next\n")[2].splitlines()
    next_lines = [line.strip() for line in shown if line.startswith("  mcore-rl ")]
    assert len(next_lines) == 3
    for line in next_lines:
        own = re.sub(r"run_dir=\S+", "run_dir=next", line)  # the quickstart's folder is other tests' too
        command = Command(page="tools/quickstart.py", line=own, is_marked=False, output=())
        tried = run(command, tmp_path, warm)
        assert tried.returncode == 0, f"{line}\n{tried.stdout}"


@pytest.mark.full
def test_the_pipeline_of_a_real_model_runs_on_a_tiny_one(warm: Path, tmp_path: Path) -> None:
    write_tokenizer(saved("llama", tmp_path / "smollm2", max_position_embeddings=512))
    few = ("--batches", "1", "mesh.ep=1")
    words = [str(warm / "python"), ROOT / "tools/real.py", "--folder", tmp_path, *few]
    subprocess.run([sys.executable, "-c", WITH_PYTHON, *words], cwd=ROOT, check=True)
    found = json.loads((tmp_path / "results.json").read_text())
    for arm in ("grpo_r2", "grpo_r3", "gspo", "grpo_lora"):
        assert 0 <= found[arm]["changed_routes"] <= 1 and len(found[arm]["batches"]) == 1
        assert 0 < found[arm]["planned_gib"] < found[arm]["peak_gib"]  # nearly all of which is the process itself
    assert "<html" in (tmp_path / "report.html").read_text()[:200]


@pytest.mark.matrix(*(pages[0] for pages in GROUPS))
@pytest.mark.parametrize("pages", GROUPS, ids=lambda pages: pages[0])
def test_commands_do_what_the_page_says(pages: tuple[str, ...], warm: Path, quickstart: Path, tmp_path: Path) -> None:
    lay_out(tmp_path, quickstart)
    failed = []
    for command in in_order(pages):
        done = run(command, tmp_path, warm)
        if done.returncode:
            failed.append(f"{command.page}: {command.line}: status {done.returncode}\n{done.stdout[-3000:]}")
        if command.output:
            assert shown(command).fullmatch("\n".join(masked(done.stdout))), f"{command}\n{done.stdout}"
    assert not failed, "\n\n".join(failed)


def in_order(pages: tuple[str, ...]) -> Iterator[Command]:
    """Each once, in the first group that has it, but for `make`: it has brought these tests here, or is the fixture."""
    seen = set()
    for group in GROUPS[: GROUPS.index(pages) + 1]:
        for command in (command for name in group for command in commands(ROOT / name)):
            words = tuple(command.words)
            if not command.is_marked and words[0] != "make" and words not in seen:
                seen.add(words)
                if group == pages:
                    yield command


def run(command: Command, folder: Path, programs: Path) -> "subprocess.CompletedProcess[str]":
    line = command.line.partition(" #")[0]
    for on_page, quick in QUICKER.items():
        line = line.replace(on_page, quick)
    before, arrow, target = line.partition(" >")
    names = (" ".join(command.words[:count]) for count in (3, 2))
    added = next((SMALLER[name] for name in names if name in SMALLER), "")
    added = added.replace(ALONE, "") if " mesh." in line else added
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    return subprocess.run(
        ["bash", "-c", f"{before} {added} {arrow}{target}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # in the order in which a terminal has both
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def lay_out(folder: Path, quickstart: Path) -> None:
    """The files that the pages take as given."""
    # Recipes and clusters are found by their names, as from a wheel: the folder has no launch/.
    (folder / "tools").symlink_to(ROOT / "tools")
    (folder / "runs").mkdir()
    (folder / "runs/quickstart").symlink_to(quickstart)
    (folder / "books").mkdir()
    library = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: path.stat().st_size)
    for path in library[-20:]:
        (folder / "books" / f"{path.stem}.txt").write_text(path.read_text())
    (folder / "data/gsm8k").mkdir(parents=True)
    for name, first in (("train", 0), ("test", 100)):
        lines = [json.dumps(apples(number)) + "\n" for number in range(first, first + 16)]
        (folder / f"data/gsm8k/{name}.jsonl").write_text("".join(lines))
    (folder / "chat.jsonl").symlink_to(quickstart / "chat.jsonl")
    shape = {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    saved("qwen3_moe", folder / "models/Qwen3-30B-A3B", torch.bfloat16, **shape)
    write_tokenizer(folder / "models/Qwen3-30B-A3B")
    saved("llama", folder / "dense")
    (folder / "model").symlink_to("models/Qwen3-30B-A3B")
    (folder / "runs/a").symlink_to("../checkpoints/qwen3")


def apples(number: int) -> dict[str, str]:
    """A problem with the fields and the form of GSM8K's, which is fetched from elsewhere."""
    question = f"Ann has {number} apples and buys {number} more for $2 each. How many has she?"
    worked = f"She has {number} + {number} = <<{number}+{number}={2 * number}>>{2 * number} apples."
    return {"question": question, "answer": f"{worked}\n#### {2 * number}"}


def shown(command: Command) -> re.Pattern[str]:
    """The output on its page as a pattern: "..." is the rest of a line or the middle of it, and alone any lines."""
    lines = masked("\n".join(command.output))
    patterns = (r"(?:.*\n)*?.*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) for line in lines)
    return re.compile("\n".join(patterns))


def masked(text: str) -> list[str]:
    """Its lines without numbers, sizes and blanks at their ends."""
    return [VARIES.sub("N", line).rstrip() for line in text.strip().splitlines()]
