import contextlib
import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli import start_ranks
from mcore_rl.cli.cli import COMMAND_GROUPS, COMMANDS, main, parser_of, split_name
from mcore_rl.cli.start_ranks import next_log_dir
from mcore_rl.cli.study import plan
from mcore_rl.config.describe import describe, describe_sections
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import load_config
from mcore_rl.config.pipeline import StudyConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import EXIT_STATUSES
from mcore_rl.launch.job import STATUS

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "launch/recipes/tiny_moe/pretrain.toml")


@pytest.mark.parametrize(
    "words", [["--help"], ["data"], ["data", "--help"], *([*name.split(), "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_has_an_example(words, capsys):
    with contextlib.suppress(SystemExit):
        main(words)
    message = capsys.readouterr()
    assert "  mcore-rl " in message.out and not message.err


def test_help_imports_neither_configs_nor_anything_that_takes_seconds():
    """The classes of configs are most of what a command imports: they are built by pydantic."""
    code = (
        "import contextlib, sys, mcore_rl.cli.cli as cli\n"
        "for words in ([], *(name.split() for name in cli.COMMANDS)):\n"
        "    with contextlib.suppress(SystemExit): cli.main([*words, '--help'])\n"
        "slow = ('torch', 'megatron', 'transformers', 'pydantic')\n"
        "sys.exit(any(name.partition('.')[0] in slow for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.full
def test_a_command_without_memory_names_the_limit_and_has_no_traceback(tmp_path):
    command = ["bash", "-c", f'ulimit -v 200000; exec "$0" -m mcore_rl.cli.cli check {tmp_path}', sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert ". The limit `ulimit -v` is 200000: raise it, here or where" in done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_help_of_a_training_explains_every_field(name, capsys):
    assert main([name, "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for doc in describe(PROGRAMS[name].config):
        kinds = f"with kind {doc.choice} " if doc.choice else ""
        words = f"{doc.key} = {doc.default} ({doc.type}) {kinds}{doc.meaning}".split()
        assert " ".join(words) in text
    with pytest.raises(SystemExit):
        main([name, "--help"])
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 30 and max(map(len, short.splitlines())) <= 80


def test_the_overview_has_every_command_once_in_a_group_and_80_columns(capsys):
    assert sorted(name for names in COMMAND_GROUPS.values() for name in names) == sorted(COMMANDS)
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:-1] for line in lines if re.fullmatch(r"\w+:", line)] == list(COMMAND_GROUPS)
    for name, command in COMMANDS.items():
        assert sum(bool(re.fullmatch(f"  {name} +{re.escape(command.brief)}", line)) for line in lines) == 1


@pytest.mark.parametrize("key", ["rl.loss", "optim", "optim.lr", "container", "rl.advantage.critic"])
def test_fields_explains_a_section_or_a_field_and_no_other(key, capsys):
    assert main(["fields", key]) == 0
    shown = set(re.findall(r"^  (\S+) = ", capsys.readouterr().out, re.MULTILINE))
    every = {doc.key for cls in KINDS.values() for doc in describe(cls)}
    assert shown == {name for name in every if name == key or name.startswith(f"{key}.")}


def test_fields_lists_sections_names_the_kinds_that_differ_and_the_nearest(capsys):
    assert main(["fields"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    sections = {doc.key for program in PROGRAMS.values() for doc in describe_sections(program.config)}
    assert sorted(listed) == sorted(sections - {""})
    assert main(["fields", "data.train"]) == 0
    assert re.findall("^--- (.*)$", capsys.readouterr().out, re.MULTILINE) == ["pretrain", "sft", "rm, dpo"]
    assert main(["fields", "data.train", "--program", "sft"]) == 0
    assert "---" not in capsys.readouterr().out
    assert main(["fields", "rl.los"]) == 2
    assert "Did you mean rl.loss?" in capsys.readouterr().err


@pytest.fixture(scope="module")
def completion():
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["completion", shell]) == 0
        scripts[shell] = output.getvalue()
    return scripts


COMPLETED = pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["pre"], ["pretrain"]),
        (["data", "s"], ["show"]),
        (["rl", "tiny_moe/gs"], ["tiny_moe/gsm8k", "tiny_moe/gspo"]),
        (["rl", "tiny_moe/grpo", "optim.l"], ["optim.lr="]),
        (["pretrain", "rl.loss"], []),
        (["launch", "x", "--cluster", "example_h"], ["example_h100"]),
        (["data", "show", "--n"], ["--num"]),
        (["fields", "rl.los"], ["rl.loss"]),
    ],
)


@COMPLETED
def test_bash_completes_commands_recipes_fields_and_options(words, wanted, completion):
    typed = " ".join(shlex.quote(word) for word in ["mcore-rl", *words])
    script = f"{completion['bash']}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _mcore_rl"
    script += "; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == wanted and not done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@COMPLETED
def test_fish_completes_the_same(words, wanted, completion, tmp_path):
    script = f"{completion['fish']}\ncomplete -C {shlex.quote(shlex.join(['mcore-rl', *words]))}"
    done = subprocess.run(["fish", "-N", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == wanted and not done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_the_same(completion, tmp_path):
    (tmp_path / "script").write_text(completion["zsh"])
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "PS1": "> "}
    typed = {"pret": "pretrain", "data sh": "data show", "rl tiny_moe/grpo optim.lr": "rl tiny_moe/grpo optim.lr="}
    command = ["zsh", "-f", "-i"]
    with subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment, cwd=tmp_path, start_new_session=True
    ) as shell:
        os.close(child)

        def output_until(text):
            seen, end_s = "", time.monotonic() + 60
            while text not in seen and time.monotonic() < end_s:
                if select.select([parent], [], [], 0.2)[0]:
                    seen += os.read(parent, 1 << 16).decode(errors="replace")
            return seen

        os.write(parent, b"source ./script; print rea''dy\n")
        output_until("ready")
        for begun, wanted in typed.items():
            # Ctrl-U empties the line.
            os.write(parent, f"\x15mcore-rl {begun}\t".encode())
            assert f"mcore-rl {wanted}" in output_until(f"mcore-rl {wanted}"), begun
        shell.kill()
    os.close(parent)


def test_after_ctrl_c_a_message_begins_on_a_line_of_its_own_on_a_terminal():
    code = "import sys; from mcore_rl.errors import after_echo as a; sys.stderr.write(a() + '.')"
    command = [sys.executable, "-c", code]
    parent, child = pty.openpty()
    subprocess.run(command, stderr=child, check=True)
    # The terminal shows ^C and stays on its line.
    assert os.read(parent, 100) == b"\r\n."
    os.close(parent)
    os.close(child)
    assert subprocess.run(command, stderr=subprocess.PIPE, check=True).stderr == b"."


def test_quiet_and_verbose_are_fields_and_eval_takes_the_folder_of_a_run(tmp_path):
    for option, field in (("-q", "quiet"), ("--verbose", "verbose")):
        args = parser_of("sft").parse_intermixed_args(["tiny_moe/sft", option, "train.seed=2"])
        assert COMMANDS["sft"].given(args) == ("tiny_moe/sft", ["train.seed=2", f"log.console={field}"])
    (tmp_path / "config.toml").write_text("")
    args = parser_of("eval").parse_intermixed_args([str(tmp_path), "rl.eval.samples=4"])
    assert COMMANDS["eval"].given(args) == (f"{tmp_path}/config.toml", [f"run_dir={tmp_path}", "rl.eval.samples=4"])


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_every_command_is_valid(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(COMMANDS[name].example)
    assert program == "mcore-rl" and split_name(words)[0] == name
    words = split_name(words)[1]
    args = parser_of(name).parse_intermixed_args(words)
    if name == "serve":
        # The servers are those of a training's rl.engine.urls.
        words = [args.config, *args.overrides, 'rl.engine.urls=["http://node7:8000"]']
    if name == "study":
        study = load_config(StudyConfig, Path(words[0]), words[1:])
        assert len(list(plan(study))) == 12, "four arms, three seeds"
    elif COMMANDS[name].config:
        assert main(["config", *words]) == 0


def test_config_prints_what_loads_back_equal(tmp_path, capsys):
    assert main(["config", TINY, "optim.lr=0.5", "--ranks", "4", "mesh.dp=2"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    wanted = load_config(PretrainConfig, Path(TINY), ["optim.lr=0.5", "mesh.dp=2"])
    assert load_config(PretrainConfig, tmp_path / "printed.toml") == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrian", TINY], "Did you mean pretrain?"),
        (["data", "tokeniser"], "Did you mean data tokenizer?"),
        (["pretrain", "gone.toml"], "gone.toml cannot be read"),
        (["pretrain", TINY, "mesh.tpp=2"], "Did you mean mesh.tp?"),
        (["pretrain", TINY, "mesh.tp=two"], 'mesh.tp = "two"'),
        (["pretrain", TINY, "mesh.ep=3", "mesh.dp=auto"], "is not a multiple of mesh.ep=3"),
        (["pretrain", TINY, "--ranks", "3"], "The world has 3 ranks"),
        (["pretrain", TINY, f"data.train={__file__}"], f"data.train names the file {__file__}.bin, which does not"),
        (["rl", "tiny_moe/grpo", "checkpoint.load=gone"], "checkpoint.load names the checkpoint gone, which does not"),
        (["config", TINY, "--mesh.tp=two"], 'mesh.tp = "two"'),
        (["sft", "tiny_moe/grpo"], "tiny_moe/grpo is a config of rl, not of sft"),
        (
            ["launch", "rl", "tiny_moe/grpo", "--cluster", "example_h100", "--nodes", "1"],
            "Leave out rl: `mcore-rl launch tiny_moe/grpo ...`",
        ),
    ],
)
def test_what_the_user_can_mend_is_told_at_once_with_status_2(words, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.startswith("ConfigError") and "Traceback" not in errors


@pytest.fixture
def data(tmp_path):
    for ending in (".bin", ".idx"):
        (tmp_path / f"data{ending}").touch()
    return f"data.train={tmp_path}/data"


def test_a_run_dir_that_cannot_be_written_is_refused_before_ranks_start(data, capsys, monkeypatch):
    # Before an import too, which takes long.
    monkeypatch.setattr(start_ranks, "ensure_imported", lambda *_: pytest.fail("imported"))
    assert main(["pretrain", TINY, data, "run_dir=/dev/null/x"]) == 2
    assert 'run_dir="/dev/null/x" cannot be written' in capsys.readouterr().err


def test_a_model_larger_than_this_machines_memory_is_refused_before_ranks_start(data, tmp_path, capsys):
    assert main(["pretrain", TINY, data, "model.hidden_size=10000000", f"run_dir={tmp_path}/run"]) == 2
    wanted = r"optimizer state of this model take [\d,]+ GiB on 2 local ranks, and this machine has \d"
    assert re.search(wanted, capsys.readouterr().err) and not (tmp_path / "run").exists()


def test_a_name_that_the_terminal_cannot_show_is_shown_by_its_code(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["config", TINY, "run_dir=\xfc"]) == 0
    assert 'run_dir = "\\xfc"' in terminal.buffer.getvalue().decode()


def test_config_finds_the_program_of_a_recipe_and_warns_of_absent_files_and_other_meshes(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "tiny_moe/grpo", "--rl.loss.kind=gspo"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# mcore-rl rl; passes all checks on 2 ranks\n")
    assert 'kind = "gspo"' in shown.out
    assert "warning: checkpoint.load names the checkpoint runs/quickstart/sft, which does not exist" in shown.err
    assert main(["config", "tiny_moe/pretrain", "model.moe.balance=global_aux_loss"]) == 0
    assert 'warning: model.moe.balance="global_aux_loss" evens out the load' in capsys.readouterr().err


@pytest.mark.matrix("recipes")
@pytest.mark.parametrize("words", ["recipes", "config tiny_moe/grpo"])
def test_a_reader_that_ends_first_leaves_no_traceback(words):
    """`mcore-rl recipes | head`: 141, as of a program that SIGPIPE ends."""
    command = [sys.executable, "-m", "mcore_rl.cli.cli", *words.split()]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    assert writer.stdout and writer.stderr
    writer.stdout.close()
    errors = writer.stderr.read()
    assert writer.wait(timeout=60) == 141
    assert "Traceback" not in errors and "BrokenPipe" not in errors


@pytest.mark.matrix("recipes")
@pytest.mark.parametrize("words", ["recipes", "config tiny_moe/grpo"])
def test_output_that_has_no_room_is_refused_without_a_traceback(words):
    """`mcore-rl config ... > file` on a full disk."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "mcore_rl.cli.cli", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=60)
    said = r"DataError: a file, or standard output: No space left on device\. Make room, .* same command again\.\n$"
    assert done.returncode == 2 and re.search(said, done.stderr)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_closed_standard_streams_keep_their_places_and_stop_nothing(tmp_path):
    """`mcore-rl ... >&- 2>&- <&-`: a file that is opened later would get their numbers, and what is printed."""
    code = (
        "import os, sys; from mcore_rl.cli.cli import main\n"
        f"status = main(['recipes']); file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "kept = [os.readlink(f'/proc/self/fd/{n}') == os.devnull and os.get_inheritable(n) for n in range(3)]\n"
        "file.write(f'{status} {kept}')"
    )
    closing = 'exec "$0" -c "$1" >&- 2>&- <&-'
    done = subprocess.run(["sh", "-c", closing, sys.executable, code], cwd=ROOT, timeout=60)
    assert (done.returncode, (tmp_path / "file").read_text()) == (0, "0 [True, True, True]")


def test_a_path_that_the_disk_refuses_is_named_without_a_traceback(capsys):
    name = "x" * 300
    assert main(["config", "tiny_moe/grpo", f"model.path={name}"]) == 2
    assert capsys.readouterr().err.startswith(f"DataError: {name}: File name too long. Correct the path, ")


def test_the_table_of_exit_statuses_has_those_of_commands_and_jobs():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    for status in {*EXIT_STATUSES, *STATUS.values()}:
        assert re.search(rf"^\| {status} \|", text, re.MULTILINE), status


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


def test_attempts_that_start_at_once_get_log_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(next_log_dir, [tmp_path] * 200))
    assert sorted(int(folder.name) for folder in folders) == list(range(200))
    (tmp_path / "logs" / "210").mkdir()
    assert next_log_dir(tmp_path).name == "211"
