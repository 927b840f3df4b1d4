"""The sandbox of programs where it is missing or broken, and its commands; tests/sandbox runs real ones."""

import stat
import sys

import pytest

from mcore_rl.config.rl.rollout import CodeConfig, RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.sandbox import Sandbox, SandboxLimits, code_function

NEEDED_BY = "the reward code"
LIMITS = SandboxLimits(time_s=20.0, memory_mib=128)


def stand_in(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_missing_sandbox_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        Sandbox(needed_by=NEEDED_BY, limits=LIMITS)
    assert f"{NEEDED_BY}: bubblewrap (bwrap) is not installed" in str(caught.value)
    assert "Install the package bubblewrap" in str(caught.value)


def test_a_sandbox_that_does_not_work_here_is_refused_with_its_own_words(tmp_path, monkeypatch):
    stand_in(tmp_path, "bwrap", "echo 'No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"runs no program on this machine .status 1.: No permissions to create"):
        Sandbox(needed_by=NEEDED_BY, limits=LIMITS)


def test_an_interpreter_that_is_none_is_refused(tmp_path, monkeypatch):
    stand_in(tmp_path, "bwrap", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r'rl.reward.code.python="/no/python" is no Python interpreter'):
        Sandbox(needed_by=NEEDED_BY, limits=LIMITS, python="/no/python")


def test_limits_and_the_filter_of_calls_do_not_depend_on_the_sandbox(tmp_path, monkeypatch):
    """A stand-in that only starts the program after "--" shows what the program's first lines do by themselves."""
    stand_in(tmp_path, "bwrap", 'while [ "$1" != -- ]; do echo "$1" >>"$0.log"; shift; done; shift; exec "$@"')
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox = Sandbox(needed_by=NEEDED_BY, limits=LIMITS, python=sys.executable)
    given = (tmp_path / "bwrap.log").read_text().splitlines()
    assert "--unshare-all" in given and given[given.index("--size") + 1] == "134217728"
    program = "import os\ntry:\n    os.fork()\nexcept PermissionError:\n    print('no process')\nbytearray(2**28)"
    result = sandbox.run(program)
    assert (result.status, result.output) == (1, "no process\n")
    assert result.errors.endswith("MemoryError\n")


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("def f(items): items.sort()\ndef g(x): return x * x", 1.0),
        ("def f(items): pass\ndef g(x): return 9", 0.5),
        ("import builtins\nbuiltins.exec = lambda *a: None\ndef f(items): pass\ndef g(x): return 8", 0.0),
        ("class A: __eq__ = lambda self, other: True\ndef f(items): items[:] = A()\ndef g(x): return A()", 0.0),
    ],
)
def test_no_code_of_a_program_runs_where_its_tests_pass(program, share, tmp_path, monkeypatch):
    """A stand-in that starts the program after "--"; tests/sandbox has many more programs."""
    stand_in(tmp_path, "bwrap", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    monkeypatch.setenv("PATH", str(tmp_path))
    code = CodeConfig(python=sys.executable, partial=True, timeout_s=60.0)
    function = code_function(RewardConfig(parts=("code",), code=code))
    tests = ["x = [3, 1]\nf(x)\nassert x == [1, 3]", "assert g(3) == 9"]
    scored = RewardInput(
        prompt="?", completion=program, answer="", num_tokens=1, is_truncated=False, fields={"tests": tests}
    )
    assert function(scored)[0] == share
