"""A chat turn by turn in a terminal: Ctrl-C within an answer ends the answer, and at the prompt the chat."""

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conversion import imported, saved
from tests.tokenizer_files import write_tokenizer

CTRL_C = b"\x03"
TIMEOUT_S = 300.0


class Terminal:
    """A program in a terminal of its own, as a user at the keys has it."""

    def __init__(self, words: list[str]) -> None:
        self._pid, self._descriptor = pty.fork()
        if not self._pid:
            os.execv(sys.executable, [sys.executable, "-m", "mcore_rl.cli.cli", *words])

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def read(self, enough: int, ending: bytes = b"") -> bytes:
        """Return what the program writes, until there are so many bytes, and they have this ending."""
        text, deadline = b"", time.monotonic() + TIMEOUT_S
        while len(text) < enough or not text.endswith(ending):
            assert time.monotonic() < deadline, text
            if select.select([self._descriptor], [], [], 1.0)[0]:
                try:
                    text += os.read(self._descriptor, 4096)
                except OSError as error:  # EIO: the program has ended
                    raise AssertionError(f"the program ended after {text!r}") from error
        return text

    def status_after(self, keys: bytes) -> int:
        """Press keys until the program ends, and return its exit status: readline, which has shown its prompt, loses a
        signal until it waits for keys. A second Ctrl-C while the program ends would be another status.
        """
        deadline = time.monotonic() + TIMEOUT_S
        next_s = 0.0
        while (ended := os.waitpid(self._pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "no end"
            if time.monotonic() > next_s:
                self.type(keys)
                next_s = time.monotonic() + 30
            time.sleep(0.05)
        return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.full
def test_ctrl_c_within_an_answer_returns_to_the_prompt(tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "hf", torch.bfloat16, max_position_embeddings=4096)
    write_tokenizer(source)
    model = imported(source, tmp_path / "model")
    # Random weights end no answer: without Ctrl-C it has 4000 tokens, which take minutes.
    terminal = Terminal(["generate", "--model", str(model.parent), "--chat", "--tokens", "4000"])
    assert b"Ctrl-C ends an answer" in terminal.read(1, b"> ")
    for said in (b"one", b"two"):
        terminal.type(said + b"\n")
        terminal.read(60)  # the echo, and the beginning of the answer
        began_s = time.monotonic()
        terminal.type(CTRL_C)
        terminal.read(1, b"\n> ")
        assert time.monotonic() - began_s < 30
    time.sleep(1)
    assert terminal.status_after(CTRL_C) == 0
