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
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of packages in which the wheel is installed, of a Python that has this one's packages beside it."""
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
    return packages


@pytest.fixture(scope="module")
def mcore_rl(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The console script of the wheel, run in an empty folder."""
    work = tmp_path_factory.mktemp("work")
    programs = packages.parents[2] / "bin"
    place = _run(programs / "python", "-c", "import mcore_rl; print(mcore_rl.__file__)", cwd=work)
    assert Path(place.strip()).is_relative_to(packages), place
    assert [path.name for path in packages.iterdir() if path.name == "launch"] == []
    return lambda *arguments: _run(programs / "mcore-rl", *arguments, cwd=work)


def _run(*arguments: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, arguments)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def pretrained(mcore_rl: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.model and a run of two steps, both learned from text."""
    folder = tmp_path_factory.mktemp("pretrained")
    library = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: path.stat().st_size)
    text, tokens, tokenizer = folder / "text", folder / "tokens", folder / "tokenizer.model"
    text.mkdir()
    for path in library[-20:]:
        (text / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    mcore_rl("data", "tokenizer", text, "--output", tokenizer, "--vocab-size", VOCAB_SIZE)
    mcore_rl("data", "preprocess", text, "--output", tokens, "--tokenizer", tokenizer)
    words = (f"run_dir={folder / 'run'}", f"data.train=['{tokens}']", *ALONE, *TWO_STEPS)
    mcore_rl("pretrain", "tiny_moe/pretrain", *words)
    return folder


def goes_on(pretrained: Path, run_dir: Path) -> tuple[str, ...]:
    """The words of a run that begins with the pretrained model."""
    tokenizer = ("data.tokenizer.kind=sentencepiece", f"data.tokenizer.path={pretrained / 'tokenizer.model'}")
    return (f"run_dir={run_dir}", f"checkpoint.load={pretrained / 'run'}", *tokenizer, *ALONE, *TWO_STEPS)


def test_every_file_of_the_package_and_of_launch_is_there(packages: Path) -> None:
    """So that a command that no test here runs lacks none either."""
    package = packages / "mcore_rl"
    assert files_of(ROOT / "mcore_rl") <= files_of(package)
    assert files_of(ROOT / "launch") == files_of(package / "shipped")


def files_of(folder: Path) -> set[tuple[str, bytes]]:
    """The names in a folder, with what is in them, but for what Python compiles."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {(path.relative_to(folder).as_posix(), path.read_bytes()) for path in files}


def test_from_text_to_a_report(mcore_rl: Command, pretrained: Path, tmp_path: Path) -> None:
    one_rollout = ("rl.rollout.prompts_per_step=2", "rl.rollout.group_size=4", "rl.rollout.max_new_tokens=8")
    mcore_rl("rl", "tiny_moe/grpo", *goes_on(pretrained, tmp_path / "rl"), *one_rollout)
    page = tmp_path / "report.html"
    mcore_rl("report", pretrained / "run", tmp_path / "rl", "--output", page)
    assert "<html" in page.read_text(encoding="utf-8")[:200]


@pytest.mark.full
def test_it_learns_demonstrations_that_it_has_written(mcore_rl: Command, pretrained: Path, tmp_path: Path) -> None:
    problems = tmp_path / "chat.jsonl"
    mcore_rl("problems", "tiny_moe/grpo", "--count", 200, "--output", problems)
    mcore_rl("sft", "tiny_moe/sft", f"data.train=['{problems}']", *goes_on(pretrained, tmp_path / "sft"))
    assert (tmp_path / "sft/DONE").exists()


def test_a_config_builds_on_what_the_wheel_has(mcore_rl: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "tiny_moe/grpo"\nrun_dir = "runs/mine"\n')
    assert 'run_dir = "runs/mine"' in mcore_rl("config", mine)
    assert 'run_dir = "runs/tiny_moe_grpo"' in mcore_rl("config", "launch/recipes/tiny_moe/grpo.toml")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('extends = "example_cpu"\nname = "mine"\n')
    assert mcore_rl("plan", "tiny_moe/pretrain", "--cluster", cluster, "--nodes", "1").startswith("yes: ")
