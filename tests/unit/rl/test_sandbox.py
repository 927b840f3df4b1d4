"""The sandbox of programs where it is missing or broken, and its commands; tests/sandbox runs real ones."""

import stat
import sys

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.rl.rewards.sandbox import Sandbox, SandboxLimits

FIELD = "rl.reward.code.sandbox"
LIMITS = SandboxLimits(time_s=20.0, memory_mib=128)


def stand_in(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("auto", "neither bubblewrap (bwrap) nor nsjail is installed"),
        ("nsjail", "nsjail (nsjail) is not installed"),
    ],
)
def test_a_missing_sandbox_is_refused_by_name(tmp_path, monkeypatch, kind, missing):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        Sandbox(kind, field=FIELD, limits=LIMITS)
    assert f'{FIELD}="{kind}": {missing}' in str(caught.value)
    assert "Install the package bubblewrap" in str(caught.value)


def test_a_sandbox_that_does_not_work_here_is_refused_with_its_own_words(tmp_path, monkeypatch):
    stand_in(tmp_path, "bwrap", "echo 'No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"runs no program on this machine .status 1.: No permissions to create"
    ):
        Sandbox("auto", field=FIELD, limits=LIMITS)


def test_an_interpreter_that_is_none_is_refused(tmp_path, monkeypatch):
    stand_in(tmp_path, "bwrap", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r'rl.reward.code.python="/no/python" is no Python interpreter'):
        Sandbox("auto", field=FIELD, limits=LIMITS, python="/no/python")


def test_limits_and_the_filter_of_calls_do_not_depend_on_the_sandbox(tmp_path, monkeypatch):
    """A stand-in that only starts the program after "--" shows what the program's first lines do by themselves."""
    stand_in(
        tmp_path, "nsjail", 'while [ "$1" != -- ]; do echo "$1" >>"$0.log"; shift; done; shift; exec "$@"'
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox = Sandbox("auto", field=FIELD, limits=LIMITS, python=sys.executable)
    assert sandbox.kind == "nsjail"
    given = (tmp_path / "nsjail.log").read_text().splitlines()
    # nsjail makes a new network namespace unless it is asked not to.
    assert not [option for option in given if option.startswith("--disable_clone")]
    assert "none:/tmp:tmpfs:size=134217728" in given
    program = (
        "import os\ntry:\n    os.fork()\nexcept PermissionError:\n    print('no process')\nbytearray(2**28)"
    )
    result = sandbox.run(program)
    assert (result.status, result.output) == (1, "no process\n")
    assert result.errors.endswith("MemoryError\n")
