"""The line below the output of a run: what a terminal shows, and what a pipe and the log get."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.workers.live_line import CLEAR, LIVE_FILE, LiveLine, bytes_of, has_live_line, show_live_line

PROGRAM = """
import sys
from mcore_rl.workers.live_line import has_live_line, show_live_line
print("first", has_live_line(), flush=True)
if has_live_line():
    import time
    show_live_line("step 1/2 " + "x" * 500)
    time.sleep(0.5)
print("second", flush=True)
"""
LAUNCH = """
import pathlib, sys
from mcore_rl.workers.launcher import launch_local
sys.exit(launch_local("a_program", [], 1, pathlib.Path("logs")))
"""


def test_lines_are_written_above_it_and_half_a_line_has_none_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    terminal, path = io.BytesIO(), tmp_path / "live"
    live = LiveLine(terminal, path)
    live.poll()
    monkeypatch.setenv(LIVE_FILE, str(path))
    assert has_live_line()
    show_live_line("step 1/20 | more than fits")
    live.poll()
    live.poll()  # the same text is not drawn again
    live.write(terminal, b"a line\n")
    live.write(terminal, b"half")
    live.write(terminal, b" a line\n")
    live.close()
    line = CLEAR + b"step 1/20"
    assert terminal.getvalue() == line + CLEAR + b"a line\n" + line + CLEAR + b"half" + b" a line\n" + line + CLEAR


def test_without_a_terminal_the_output_is_as_it_is(tmp_path: Path) -> None:
    pipe = io.BytesIO()
    live = LiveLine(pipe, None)
    live.poll()
    live.write(pipe, b"a line\n")
    live.close()
    assert pipe.getvalue() == b"a line\n"


def started(folder: Path, **streams: int) -> "subprocess.Popen[bytes]":
    (folder / "a_program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    environment["PYTHONPATH"] = f"{folder}:{Path(__file__).parents[3]}"
    return subprocess.Popen([sys.executable, "-c", LAUNCH], cwd=folder, env=environment, **streams)


def test_a_terminal_shows_it_and_the_ranks_log_does_not_have_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = started(tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    assert seen.startswith(b"first True\r\n" + CLEAR + b"step 1/2 xxx")
    # The line is cleared before the next one, and at the end.
    assert seen.endswith((CLEAR + b"second\r\n", CLEAR))
    assert max(len(line) for line in seen.replace(CLEAR, b"\n").splitlines()) < 80
    assert (tmp_path / "logs/rank_0.log").read_bytes() == b"first True\nsecond\n"
    assert not (tmp_path / "logs/.live").exists()


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    process = started(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == (b"first False\nsecond\n", b"")


def test_output_reaches_a_stream_of_text_alone_such_as_a_notebooks():
    notebook = io.StringIO()
    console = bytes_of(notebook)
    for chunk in ("step é".encode()[:-1], "é\n".encode()[1:]):
        console.write(chunk)
        console.flush()
    assert notebook.getvalue() == "step é\n"
    file = io.TextIOWrapper(io.BytesIO())
    assert bytes_of(file) is file.buffer
