"""Every command that writes a file: it replaces what a command of its kind wrote, and nothing else."""

import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.config.run import PretrainConfig
from tests.replacing import files_of
from tests.report_runs import write_run

ROOT = Path(__file__).parents[3]
H100 = str(ROOT / "launch/clusters/example_h100.toml")
PLAN = ["plan", "tiny_moe/pretrain", "--cluster", H100, "--nodes", "1"]
TOKENIZER = ["data", "tokenizer", "books/a.txt", "--vocab-size", "300", "--overwrite", "--output"]
PREPROCESS = ["data", "preprocess", "books/a.txt", "--tokenizer", "tok.model", "--overwrite", "--output"]
PROBLEMS = ["problems", "tiny_moe/grpo", "--count", "5", "--output"]
STUDY = ["study", "study.toml"]
ENDINGS = (".bin", ".idx", ".json")
COMMANDS = {
    "report": (["report", "runs/x", "--output", "page.html"], "page.html"),
    "problems": ([*PROBLEMS, "chat.jsonl"], "chat.jsonl"),
    "problems to validate on": ([*PROBLEMS, "chat.jsonl", "--valid", "2"], "chat_valid.jsonl"),
    "tokenizer": ([*TOKENIZER, "new.model"], "new.model"),
    "preprocess": ([*PREPROCESS, "tokens"], "tokens.json"),
    "preprocess's tokens": ([*PREPROCESS, "tokens"], "tokens.bin"),
    "preprocess's log": ([*PREPROCESS, "tokens"], "tokens.log.jsonl"),
    "plan": ([*PLAN, "--json", "plan.json"], "plan.json"),
}
"""Arguments of a command, and a file that it writes."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run, texts and a tokenizer of them."""
    home = tmp_path_factory.mktemp("home")
    write_run(home, PretrainConfig(run_dir="runs/x"), 3)
    (home / "books").mkdir()
    (home / "books/a.txt").write_text("It was the best of times, it was the worst of times.\n" * 9)
    before = Path.cwd()
    os.chdir(home)
    try:
        assert main([*TOKENIZER, "tok.model"]) == 0
    finally:
        os.chdir(before)
    return home


@pytest.fixture
def home(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_a_users_file_is_not_replaced(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, file = COMMANDS[name]
    Path(file).write_text("mine")
    before = files_of(home)
    assert main(arguments) == 2
    assert file in capsys.readouterr().err and files_of(home) == before


@pytest.mark.matrix("problems", "tokenizer", "preprocess's tokens", "preprocess's log", "plan")
@pytest.mark.parametrize("name", COMMANDS)
def test_its_own_file_is_replaced_until_somebody_changes_it(name: str, home: Path) -> None:
    arguments, file = COMMANDS[name]
    assert main(arguments) == 0
    first = Path(file).read_bytes()
    assert main(arguments) == 0
    if name in ("report", "plan", "plan's picture", "preprocess's log"):
        return  # these are known by a mark: nobody goes on writing them
    Path(file).write_bytes(first[:-1] + b"!")
    changed = files_of(home)
    assert main(arguments) == 2
    assert files_of(home) == changed


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["report", "runs/x", "--output", "runs/x/config.toml"], "lies in a run (runs/x)"),
        (["report", "runs/x", "--output", "runs/x/metrics.jsonl"], "lies in a run (runs/x)"),
        ([*PROBLEMS, "runs/x/config.toml"], "lies in the folder of a run"),
        (["problems", "grpo.toml", "--output", "grpo.toml"], "output grpo.toml is CONFIG (grpo.toml)"),
        ([*TOKENIZER, "books/a.txt"], "output books/a.txt is an input (books/a.txt)"),
        ([*PREPROCESS, "tok"], "tok.json are no dataset that"),
        (["data", "preprocess", "tok.json", *PREPROCESS[3:], "tok"], "output tok.json is an input (tok.json)"),
        (["data", "preprocess", "books", *PREPROCESS[3:], "books/all"], "output books/all.bin lies in an input"),
        (["data", "preprocess", "books/a.txt", *PREPROCESS[3:], "links/tokens"], "no dataset that"),
        ([*PLAN, "--json", "runs/x/run.json"], "lies in the folder of a run"),
        ([*PLAN[:2], "--cluster", "mine.toml", *PLAN[4:], "--json", "mine.toml"], "output mine.toml is --cluster"),
        ([*STUDY, "run_dir=runs/x"], "output runs/x/study.md lies in the folder of a run"),
        ([*STUDY, "run_dir=."], "study.md was not written by `mcore-rl study`"),
        ([*PREPROCESS, "busy"], "busy.partial is in the way"),
    ],
    ids=lambda value: "-".join(value[:1] + value[-1:]) if isinstance(value, list) else "",
)
def test_a_source_and_what_lies_around_it_stay(
    arguments: list[str], refusal: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tok.json").write_text('{"text": "a user\'s lines"}\n')
    shutil.copy(H100, "mine.toml")
    Path("grpo.toml").write_text(f'extends = "{ROOT}/launch/recipes/tiny_moe/grpo.toml"\n')
    Path("study.toml").write_text('base = "grpo.toml"\nseeds = [1]\n[arms]\n"A" = []\n')
    Path("study.md").write_text("# What I study")
    Path("links").mkdir()
    for ending in ENDINGS:
        Path(f"links/tokens{ending}").symlink_to(home / "tok.json")
    Path("busy.partial").mkdir()
    Path("busy.partial/thoughts.txt").write_text("mine")
    before = files_of(home)
    assert main(arguments) == 2
    assert refusal in capsys.readouterr().err.replace("\n", " ")
    assert files_of(home) == before


@pytest.mark.matrix("0-same command")
@pytest.mark.parametrize("other", [False, True], ids=["same command", "another one"])
@pytest.mark.parametrize("moves", range(6))
def test_a_dataset_whose_replacing_was_killed_is_replaced_by_the_next_command(
    moves: int, other: bool, home: Path
) -> None:
    assert main([*PREPROCESS, "tokens"]) == 0
    old = {ending: Path(f"tokens{ending}").read_bytes() for ending in ENDINGS}
    Path("books/a.txt").write_text("It was the age of wisdom, it was the age of foolishness.\n" * 9)

    def ended() -> None:
        """Replace it, and be killed after so many of the six renamings."""
        left, replace = [moves], os.replace

        def counted(one: Path, name: Path) -> None:
            moved = [f"replaced{ending}" for ending in ENDINGS]
            if Path(name).name in moved or Path(one).name.startswith("merged."):
                left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(one, name)

        os.replace = counted
        main([*PREPROCESS, "tokens"])

    process = get_context("fork").Process(target=ended)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    for ending, content in old.items():
        places = (Path(f"tokens{ending}"), Path(f"tokens.partial/replaced{ending}"))
        assert content in [path.read_bytes() for path in places if path.exists()]
    if other:
        Path("books/a.txt").write_text("It was the epoch of belief.\n" * 9)
    assert main([*PREPROCESS, "tokens"]) == 0
    assert main([*PREPROCESS, "again"]) == 0
    assert not Path("tokens.partial").exists()
    for ending in ENDINGS:
        assert Path(f"tokens{ending}").read_bytes() == Path(f"again{ending}").read_bytes()
