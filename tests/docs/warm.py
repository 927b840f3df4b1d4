"""`mcore-rl` and `python` for a shell whose process is a copy of one that has torch, Megatron and all programs in
memory, seconds sooner; so is its rank, where it has one.

What a fresh Python does with the command is tested by tests/wheel and tests/e2e.
"""

import importlib
import json
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path

from mcore_rl.cli import cli
from mcore_rl.cli.cli import COMMANDS
from tests.ranks import forkserver

CLIENT = """#!{python} -IS
import json, os, socket, sys
words = {first!r} + sys.argv[1:]
if words[0] == "-m":
    del words[0]
elif words[0] not in {tools!r}:
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    status = server.recv(1)
sys.exit(status[0] if status else 255)
"""
"""A command that hands its words, folder, environment and standard streams to the server, and ends with its status. The
first word is a module or a file."""
TOOLS = ("tools/train_tokenizer.py", "tools/preprocess.py")
"""Files that `python` runs in a copy; it runs the others as Python does."""
CLI = "mcore_rl.cli.cli"


@contextmanager
def warm_commands(folder: Path) -> Iterator[Path]:
    """Make the executables `mcore-rl`, and `python` for modules and TOOLS, in a folder; they work inside."""
    address = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    for name, first in (("mcore-rl", ["-m", CLI]), ("python", [])):
        text = CLIENT.format(python=sys.executable, address=str(address), first=first, tools=TOOLS)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    server = forkserver().Process(target=_serve, args=(listener,))
    server.start()
    listener.close()
    try:
        yield folder
    finally:
        server.kill()
        server.join()


def _serve(listener: socket.socket) -> None:
    for command in COMMANDS.values():
        importlib.import_module(command.module)
    while True:
        connection, _ = listener.accept()
        get_context("fork").Process(target=_answer, args=(connection,)).start()
        connection.close()
        active_children()  # takes in those that have ended


def _answer(connection: socket.socket) -> None:
    """Run the command of a client in this process."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        (program, *words), folder, environment = json.loads(file.read(int.from_bytes(size, "big")))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Of their own, as in a fresh process: those of before were made for streams of another kind.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["mcore-rl", *words]
    status = 1
    try:
        if program == CLI:
            status = cli.main(words)
        else:
            run = runpy.run_path if program in TOOLS else runpy.run_module
            run(program, run_name="__main__")
            status = 0
    except SystemExit as end:  # argparse's
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        connection.sendall(bytes([status & 255]))
