"""Programs in bubblewrap itself: what they may do, and what they may not."""

import pytest

from mcore_rl.rl.rewards.sandbox import Sandbox, SandboxLimits

LIMITS = SandboxLimits(time_s=20.0, memory_mib=64, output_kib=64)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(needed_by="the reward code", limits=LIMITS)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


def test_a_program_reads_its_input_and_ends_with_its_own_status(sandbox):
    result = sandbox.run("import sys\nprint(input()[::-1])\nprint('é', file=sys.stderr)\nsys.exit(3)", "abc\nrest")
    assert (result.status, result.output, result.errors) == (3, "cba\n", "é\n")


def test_a_traceback_is_of_the_program_alone(sandbox):
    assert sandbox.run("def f():\n    return 1 / 0\nf()").errors.splitlines() == [
        "Traceback (most recent call last):",
        '  File "program.py", line 3, in <module>',
        '  File "program.py", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = bytearray(2**27)", "MemoryError"),
        ("import os; os.fork()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "PermissionError: [Errno 1]"),
        ("import socket; socket.create_connection(('10.0.0.1', 80), timeout=5)", "Network is unreachable"),
        ("open('/usr/written', 'w')", "Read-only file system"),
        ("open('/etc/passwd')", "No such file or directory: '/etc/passwd'"),
        ("open('/tmp/file', 'wb', buffering=0).write(b'x' * 2**17); open('/tmp/more', 'xb').write(b'')", ""),
        ("import os; [os.write(1, b'x' * 2**14) for _ in range(8)]", "File too large"),
        ("for i in range(2000):\n    open(f'/tmp/{i}', 'wb').write(b'x' * 2**16)", "No space left on device"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError: not allowed"),
        (
            "import ctypes, os\nif ctypes.CDLL(None, use_errno=True).unshare(0x10000000):\n"
            "    raise OSError(ctypes.get_errno(), 'refused')",
            "PermissionError: [Errno 1] refused",
        ),
    ],
)
def test_what_a_program_may_not_do_is_an_error_in_it(sandbox, program, error):
    result = sandbox.run(program)
    assert error in last_line(result.errors), result
    assert result.status == (1 if error else 0)


def test_a_program_sees_neither_files_nor_processes_nor_the_environment(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "1")
    (tmp_path / "secret").write_text("1")
    program = (
        "import os\nprint(os.listdir(os.getcwd()), os.getuid(), 'SECRET' in os.environ, os.path.exists('/home'))\n"
        f"print(os.path.exists({str(tmp_path)!r}), max(int(x) for x in os.listdir('/proc') if x.isdigit()))"
    )
    first, second = sandbox.run(program).output.splitlines()
    assert first == "[] 65534 False False"
    assert second == "False 2"


def test_threads_run_and_nothing_of_one_program_is_left_for_the_next(sandbox):
    program = (
        "import os, threading\nthreads = [threading.Thread(target=print, args=(i,)) for i in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\nopen('/tmp/left', 'w'); print(os.listdir('/tmp'))"
    )
    for _ in range(2):
        assert sorted(sandbox.run(program).output.split()) == ["0", "1", "2", "['left']"]


def test_a_program_that_takes_too_long_is_killed_with_its_threads():
    sandbox = Sandbox(needed_by="the reward code", limits=LIMITS)
    # So much time is for the start of the interpreter beside other tests.
    result = sandbox.run("print('begun', flush=True)\nimport time\ntime.sleep(600)", time_s=5.0)
    assert (result.is_timeout, result.status, result.output) == (True, None, "begun\n")
    assert sandbox.run("import os; os.kill(os.getpid(), 9)").status == 137
