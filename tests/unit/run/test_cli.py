import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.describe import describe
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.study import StudyConfig
from mcore_rl.run.cli import main, parser_of, split_name
from mcore_rl.run.commands import COMMANDS
from mcore_rl.run.log_folders import next_log_dir
from mcore_rl.run.study import plan

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "launch/recipes/tiny_moe/pretrain.toml")


def mcore_rl(*words, **variables):
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "mcore_rl.run.cli", *words],
        cwd=ROOT,
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "words",
    [["--help"], ["data"], ["data", "--help"], *([*name.split(), "--help"] for name in COMMANDS)],
    ids=" ".join,
)
def test_help_has_an_example(words, capsys):
    with contextlib.suppress(SystemExit):
        main(words)
    told = capsys.readouterr()
    assert "  mcore-rl " in told.out and not told.err


def test_help_imports_nothing_that_takes_seconds():
    code = (
        "import contextlib, sys, mcore_rl.run.cli as cli\n"
        "for words in ([], *(name.split() for name in cli.COMMANDS)):\n"
        "    with contextlib.suppress(SystemExit): cli.main([*words, '--help'])\n"
        "sys.exit(any(name.partition('.')[0] in ('torch', 'megatron', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_help_of_a_training_explains_every_field(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for doc in describe(PROGRAMS[name].config):
        words = f"{doc.key} = {doc.default} ({doc.type}) {doc.meaning}".split()
        assert " ".join(words) in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_every_command_is_valid(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(COMMANDS[name].example)
    assert program == "mcore-rl" and split_name(words)[0] == name
    words = split_name(words)[1]
    parser_of(name).parse_intermixed_args(words)
    if name == "study":
        study = load_config(StudyConfig, Path(words[0]), words[1:])
        assert len(list(plan(study))) == 12, "four arms, three seeds"
    elif COMMANDS[name].config:
        program = "rl" if name == "eval" else name
        program = ["--program", program] if program in PROGRAMS else []
        assert main(["config", *program, *words]) == 0


def test_config_prints_what_loads_back_equal(tmp_path, capsys):
    assert main(["config", TINY, "optim.lr=0.5", "--ranks", "4", "mesh.dp=2"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    wanted = load_config(PretrainConfig, Path(TINY), ["optim.lr=0.5", "mesh.dp=2"])
    assert load_config(PretrainConfig, tmp_path / "printed.toml") == wanted


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pretrian", TINY], "Did you mean pretrain?"),
        (["data", "tokeniser"], "Did you mean data tokenizer?"),
        (["pretrain", "gone.toml"], "gone.toml cannot be read"),
        (["pretrain", TINY, "mesh.tpp=2"], "Did you mean mesh.tp?"),
        (["pretrain", TINY, "mesh.tp=two"], 'mesh.tp = "two"'),
        (["pretrain", TINY, "mesh.ep=3", "mesh.dp=auto"], "is not a multiple of mesh.ep=3"),
        (["pretrain", TINY, "--ranks", "3"], "The world has 3 ranks"),
        (["pretrain", TINY, "run_dir=/dev/null/x"], "cannot be written"),
    ],
)
def test_what_the_user_can_mend_is_told_at_once_with_status_2(words, told, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert told in errors and errors.startswith("ConfigError") and "Traceback" not in errors


@pytest.mark.parametrize("words", [["pretrain"], ["pretrain", TINY, "--ranks", "0"]])
def test_wrong_arguments_end_with_status_2(words):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2


def test_the_number_of_ranks_is_left_to_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["pretrain", TINY, "--ranks", "2"]) == 2
    assert "a launcher has started the ranks" in capsys.readouterr().err


def test_each_attempt_gets_a_log_folder_of_its_own(tmp_path):
    assert [next_log_dir(tmp_path).name for _ in range(3)] == ["0", "1", "2"]
    (tmp_path / "logs" / "10").mkdir()
    assert next_log_dir(tmp_path).name == "11"
