"""The built wheel is whole: in an environment without the repository its commands go from text to a report."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "mcore_rl", "launch")
VOCAB_SIZE = 800
ALONE = ("mesh.tp=1", "mesh.ep=1", f"model.vocab_size={VOCAB_SIZE}")
TWO_STEPS = ("train.steps=2", "optim.warmup_steps=0", "train.global_batch=8", "train.eval_interval=none")
Command = Callable[..., str]


@pytest.fixture(scope="module")
def mcore_rl(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The console script of the wheel, run in an empty folder by a Python that has this one's packages beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        found = ROOT / name
        if found.is_dir():
            shutil.copytree(found, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif found.exists():
            shutil.copy(found, source)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    _run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source)
    environment = folder / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    (wheel,) = folder.glob("*.whl")
    python = environment / "bin/python"
    _run(*pip, "--python", python, "install", *offline, wheel)
    # A folder that a .pth file names is searched, but its own .pth files, which know the repository, are not read.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    work = folder / "work"
    work.mkdir()
    place = _run(python, "-c", "import mcore_rl; print(mcore_rl.__file__)", cwd=work)
    assert Path(place.strip()).is_relative_to(packages), place
    assert [path.name for path in packages.iterdir() if path.name == "launch"] == []
    return lambda *arguments: _run(environment / "bin/mcore-rl", *arguments, cwd=work)


def _run(*arguments: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, arguments)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_from_text_to_a_report(mcore_rl: Command, tmp_path: Path) -> None:
    library = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: path.stat().st_size)
    text, tokens, tokenizer = tmp_path / "text", tmp_path / "tokens", tmp_path / "tokenizer.model"
    text.mkdir()
    for path in library[-20:]:
        (text / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    mcore_rl("data", "tokenizer", text, "--output", tokenizer, "--vocab-size", VOCAB_SIZE)
    mcore_rl("data", "preprocess", text, "--output", tokens, "--tokenizer", tokenizer)

    pretrained, tuned, learned = (tmp_path / name for name in ("pretrain", "sft", "rl"))
    with_tokenizer = ("data.tokenizer.kind=sentencepiece", f"data.tokenizer.path={tokenizer}")
    common = (*ALONE, *TWO_STEPS)
    mcore_rl("pretrain", "tiny_moe/pretrain", f"run_dir={pretrained}", f"data.train=['{tokens}']", *common)
    problems = tmp_path / "chat.jsonl"
    mcore_rl("problems", "tiny_moe/grpo", "--count", 200, "--output", problems)
    data = (f"data.train=['{problems}']", *with_tokenizer)
    load = f"checkpoint.load={pretrained}"
    mcore_rl("sft", "tiny_moe/sft", f"run_dir={tuned}", *data, load, *common)
    one_rollout = ("rl.rollout.prompts_per_step=2", "rl.rollout.group_size=4", "rl.rollout.max_new_tokens=8")
    load = f"checkpoint.load={tuned}"
    mcore_rl("rl", "tiny_moe/grpo", f"run_dir={learned}", *with_tokenizer, load, *common, *one_rollout)

    page = tmp_path / "report.html"
    mcore_rl("report", pretrained, tuned, learned, "--output", page)
    assert "<html" in page.read_text(encoding="utf-8")[:200]


def test_a_config_builds_on_what_the_wheel_has(mcore_rl: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "tiny_moe/grpo"\nrun_dir = "runs/mine"\n')
    assert 'run_dir = "runs/mine"' in mcore_rl("config", mine)
    assert 'run_dir = "runs/tiny_moe_grpo"' in mcore_rl("config", "launch/recipes/tiny_moe/grpo.toml")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('extends = "example_cpu"\nname = "mine"\n')
    assert mcore_rl("plan", "tiny_moe/pretrain", "--cluster", cluster, "--nodes", "1").startswith("yes: ")
