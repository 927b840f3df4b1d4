"""Programs of a model: the sandbox that runs untrusted Python, and the reward that runs a prompt's tests in it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from mcore_rl.config.rl.rollout import CodeConfig, RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.rewards import proxies
from mcore_rl.rl.rewards.interface import RewardFunction, RewardInput
from mcore_rl.rl.rewards.rules import answered
from mcore_rl.rl.workers import cut

EXECUTABLE = "bwrap"
NOBODY = 65534
"""User and group inside the sandbox."""
HOME = "/tmp"
"""Working folder of a program: initially empty, in memory, and gone when the program ends."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr")
"""Folders of the system, which a program may read."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
MIB = 2**20
TRIAL_S = 30.0
"""Time limit of a sandbox's trial, in seconds: the first start reads the interpreter from the disk."""
DENIED_CALLS: dict[str, dict[str, int]] = {
    "x86_64": {"fork": 57, "vfork": 58, "ptrace": 101, "keyctl": 250, "unshare": 272, "setns": 308, "bpf": 321},
    "aarch64": {"ptrace": 117, "keyctl": 219, "unshare": 97, "setns": 268, "bpf": 280},
}
"""System calls denied to a program (EPERM), by machine: they create processes or namespaces, or reach into other
processes and the kernel. The filter also denies io_uring, which would bypass it, and clone for anything but threads."""
CLONE_CALL = {"x86_64": 56, "aarch64": 220}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Identifier of the machine in a system call filter (linux/audit.h)."""
BOOTSTRAP = """
import ctypes, os, resource, struct, sys
def take(size):
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
numbers = list(map(int, take(256).split()))
size, memory, cpu, written, arch, clone, *denied = numbers
for name, limit in (("AS", memory), ("CPU", cpu), ("FSIZE", written), ("CORE", 0), ("NOFILE", 256)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
filter = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
for kind, call, answer in [
    (ABOVE, 0x40000000, EPERM), (EQUAL, 435, ENOSYS), (EQUAL, 425, EPERM), *((EQUAL, call, EPERM) for call in denied)
]:
    filter += [(kind, 0, 1, call), (RETURN, 0, 0, answer)]
filter += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (ANY_BIT, 1, 0, 0x10000), (RETURN, 0, 0, EPERM)]
filter += [(RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filter))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit("the filter of system calls cannot be set")
source = take(size).decode()
sys.argv = ["program.py"]
def show(kind, error, trace):
    import traceback
    traceback.print_exception(kind, error, trace.tb_next)
sys.excepthook = show
exec(compile(source, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""
"""First code that the interpreter runs. It reads the limits and the program from standard input, ahead of the program's
own input. It lowers hard limits and installs a system call filter, neither of which the program can undo. clone3 fails
with ENOSYS, so that the C library falls back to clone: a filter can read the flags of clone."""
HEADER_BYTES = 256


class SandboxLimits(NamedTuple):
    """Resource limits of a program, which is a single process and may start threads."""

    time_s: float = 10.0
    """Seconds until the program is killed."""
    memory_mib: int = 512
    """Limit on the address space, and on the total size of the files that the program writes, in MiB."""
    output_kib: int = 1024
    """Limit on standard output, standard error and each file, in KiB; writing more raises an OSError in the program."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of a program that ran in a sandbox."""

    status: int | None
    """Exit status; 128 + n if signal n ended the program; None if it reached the time limit."""
    output: str
    """Standard output."""
    errors: str
    """Standard error, including the traceback of an exception."""

    @property
    def is_timeout(self) -> bool:
        """Whether the program was killed at the time limit."""
        return self.status is None


class Sandbox:
    """Runs each program in its own namespaces, without a network: it sees only the system's and the interpreter's
    files, read-only, and an empty folder in memory. Safe to use from several threads.
    """

    def __init__(self, *, needed_by: str, limits: SandboxLimits, python: str | None = None) -> None:
        """Find the sandbox and run a trial program in it. `needed_by` names a setting in errors; `python` is an
        interpreter with packages (None: this process's, without). Raises ConfigError if either is missing or does not
        work here.
        """
        if (machine := os.uname().machine) not in AUDIT_ARCH:
            raise ConfigError(
                f"{needed_by}: programs run in a sandbox on {' and '.join(AUDIT_ARCH)}, not on {machine}."
            )
        self.limits = limits
        executable = shutil.which(EXECUTABLE)
        if executable is None:
            raise ConfigError(
                f"{needed_by}: bubblewrap ({EXECUTABLE}) is not installed on this machine, and programs of a model are "
                "not run without a sandbox. Install the package bubblewrap."
            )
        interpreter, prefixes = _interpreter(python)
        self._command = [*_bubblewrap(executable, prefixes, limits), interpreter, "-I", "-X", "utf8", "-c", BOOTSTRAP]
        trial = self.run("print(6 * 7)", time_s=TRIAL_S)
        if trial.status != 0 or trial.output != "42\n":
            how = f"status {trial.status}" if trial.status is not None else f"no answer within {TRIAL_S:g} s"
            raise ConfigError(
                f"{needed_by}: {executable} is installed, and runs no program on this machine ({how}): "
                f"{trial.errors.strip()[-500:] or 'it says nothing'}. Unprivileged user namespaces must be allowed "
                "(sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; a container "
                f"needs --security-opt seccomp=unconfined); bubblewrap must be 0.7 or newer."
            )

    def run(self, program: str, stdin: str = "", *, time_s: float | None = None) -> ProgramResult:
        """Run the Python source `program` on `stdin`, for at most `time_s` seconds (None: the sandbox's limit)."""
        limits = self.limits if time_s is None else self.limits._replace(time_s=time_s)
        with self._started(program, stdin, limits) as result:
            return result()

    def run_both(self, *programs: tuple[str, Mapping[str, Any]]) -> ProgramResult:
        """Run two programs, each in its own namespaces, with a pipe from either to the other; return the second's
        result, and kill the first when the second ends. Each is Python source with an object that it reads as JSON from
        its standard input; its entry `pipes` has the file descriptors to read and to write.
        """
        with ExitStack() as stack:
            ends = [end for _ in programs for end in os.pipe()]
            files = [stack.enter_context(os.fdopen(end, "wb")) for end in ends]
            for (source, given), pipes in zip(programs, ((ends[0], ends[3]), (ends[2], ends[1])), strict=True):
                stdin = json.dumps({**given, "pipes": pipes})
                result = stack.enter_context(self._started(source, stdin, self.limits, pipes))
            # The pipe of a program that ends must have no other writer.
            for file in files:
                file.close()
            return result()

    @contextmanager
    def _started(
        self, program: str, stdin: str, limits: SandboxLimits, pipes: Sequence[int] = ()
    ) -> Iterator[Callable[[], ProgramResult]]:
        """Start a program, and give a function that waits for its result; the program is killed at the end."""
        source = program.encode("utf-8", "replace")
        machine = os.uname().machine
        numbers = (
            len(source),
            limits.memory_mib * MIB,
            int(limits.time_s) + 1,  # CPU seconds, summed over all threads
            limits.output_kib * 1024,
            AUDIT_ARCH[machine],
            CLONE_CALL[machine],
            *DENIED_CALLS[machine].values(),
        )
        header = " ".join(map(str, numbers)).ljust(HEADER_BYTES).encode()
        # Files rather than pipes: writes never wait for a reader, and the limit on file sizes also limits the output.
        with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
            given.write(header + source + stdin.encode("utf-8", "replace"))
            given.seek(0)
            process = subprocess.Popen(
                self._command, stdin=given, stdout=output, stderr=errors, cwd="/", env=ENVIRONMENT, pass_fds=pipes
            )

            def end() -> None:
                # This ends the first process inside the sandbox, and with it everything in its namespace.
                process.kill()
                process.wait()

            def result() -> ProgramResult:
                status: int | None = None
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(limits.time_s)
                end()
                most = limits.output_kib * 1024
                if status is not None and status < 0:
                    status = 128 - status
                return ProgramResult(status, _text(output, most), _text(errors, most))

            try:
                yield result
            finally:
                end()


def _interpreter(python: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the interpreter and the folders that it needs. Raises ConfigError if `python` does not run."""
    if python is None:
        return sys._base_executable, (sys.base_prefix,)  # type: ignore[attr-defined]
    ask = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, sep='\\n')"
    try:
        found = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True, timeout=TRIAL_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f'rl.reward.code.python="{python}" is no Python interpreter: {error}. Correct its path.'
        ) from error
    executable, *prefixes = found.stdout.splitlines()
    return executable, tuple(dict.fromkeys(prefixes))


def _bubblewrap(executable: str, prefixes: Sequence[str], limits: SandboxLimits) -> list[str]:
    binds: list[str] = []  # the folders that a program may read
    for folder in map(Path, SYSTEM_FOLDERS):
        if folder.is_symlink():
            binds += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            binds += ["--ro-bind", str(folder), str(folder)]
    for prefix in map(Path, prefixes):
        if not prefix.is_relative_to("/usr"):
            binds += ["--ro-bind", str(prefix), str(prefix)]
    return [
        executable,
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"),
        *("--size", str(limits.memory_mib * MIB), "--tmpfs", HOME),
        *binds,  # after it: an interpreter may lie within the folder's name
        *("--proc", "/proc", "--dev", "/dev", "--chdir", HOME),
        *("--setenv", "HOME", HOME, "--setenv", "PATH", "/usr/bin:/bin", "--"),
    ]


def _text(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace")


CODE_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
"""Fenced block of Markdown."""
SHOWN_CHARACTERS = 200
"""Maximum number of characters of a test, or of a program's output, in a reason."""
OUTPUT_KIB = 1024


def code_function(config: RewardConfig) -> RewardFunction:
    """Return the reward function of the part `code`. Raises ConfigError if no sandbox works on this machine."""
    code = config.code
    limits = SandboxLimits(time_s=code.timeout_s, memory_mib=code.memory_mib, output_kib=OUTPUT_KIB)
    sandbox = Sandbox(needed_by="the reward code", limits=limits, python=code.python)
    return partial(passes_tests, sandbox=sandbox, config=code, answer_pattern=config.answer_pattern or "")


def passes_tests(
    scored: RewardInput, *, sandbox: Sandbox, config: CodeConfig, answer_pattern: str
) -> tuple[float, str]:
    """Return the score of a completion's program, and how its first failing test failed: 1 if all tests pass, else 0,
    or with `rl.reward.code.partial` the fraction that pass. Raises ValueError if the prompt's field
    `rl.reward.code.tests_field` has no tests in a known form.
    """
    program = program_of(scored.completion, answer_pattern)
    tests = tests_of(scored.fields, config.tests_field)
    deadline = time.monotonic() + config.timeout_s
    if isinstance(tests[0], str):
        num_passed, reason = _run_asserts(program, [str(test) for test in tests], sandbox)
    else:
        num_passed, reason = 0, ""
        for given, wanted in tests:
            failed = _wrong_output(program, given, wanted, sandbox, deadline)
            num_passed += failed is None
            reason = reason or failed or ""
            if failed is not None and not config.partial:
                break
    if config.partial:
        return num_passed / len(tests), reason
    return float(num_passed == len(tests)), reason


def program_of(completion: str, answer_pattern: str) -> str:
    """Return a completion's program: the match of `answer_pattern`; without a pattern the last fenced block, or all."""
    if answer_pattern:
        return answered(completion, answer_pattern)
    blocks = CODE_BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def tests_of(fields: Mapping[str, Any], name: str) -> list[str] | list[tuple[str, str]]:
    """Return a prompt's tests, at least one: Python source texts, or (input, output) pairs."""
    tests = fields.get(name)
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError:  # Python may begin with a bracket too
            tests = [tests]
    if isinstance(tests, str) and tests.strip():
        return [tests]
    if isinstance(tests, Mapping) and tests.keys() >= {"inputs", "outputs"}:
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": given, "output": wanted} for given, wanted in pairs]
    if isinstance(tests, Sequence) and tests:
        if all(isinstance(test, str) for test in tests):
            return list(tests)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
            return [(_lines(test["input"]), _lines(test["output"])) for test in tests]
    raise ValueError(
        f'the prompt\'s field "{name}" is {cut(repr(tests), SHOWN_CHARACTERS)}; wanted tests: a list of texts of '
        'Python, or of {"input", "output"}'
    )


def _lines(value: Any) -> str:
    """Convert a test's input or output to text: a list becomes one line per entry, null the empty text."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _run_asserts(program: str, tests: list[str], sandbox: Sandbox) -> tuple[int, str]:
    """Return the number of tests that pass, and why the first failing test fails. The program runs in another sandbox
    than the tests, which ask it: no code of the program runs where tests pass.
    """
    source = getsource(proxies)
    result = sandbox.run_both(
        (f"{source}\nserve_program()", {"program": program}), (f"{source}\nrun_tests()", {"tests": tests})
    )
    passed = result.output.splitlines()
    failed = [index for index in range(len(tests)) if str(index) not in passed]
    if not failed:
        return len(tests), ""
    return len(passed), f"test {failed[0] + 1}: {_ended(result) or 'not reached'}"


def _wrong_output(program: str, given: str, wanted: str, sandbox: Sandbox, deadline: float) -> str | None:
    """Describe how the output differs from the expected one, apart from white space at ends; None if it does not."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "the time was over"
    result = sandbox.run(program, given, time_s=left_s)
    if result.status != 0:
        return f"for {cut(given.strip(), SHOWN_CHARACTERS)!r}: {_ended(result)}"
    if _stripped(result.output) == _stripped(wanted):
        return None
    shown = [cut(text.strip(), SHOWN_CHARACTERS) for text in (given, result.output, wanted)]
    return f"for {shown[0]!r} the output is {shown[1]!r}, wanted {shown[2]!r}"


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _ended(result: ProgramResult) -> str:
    """Return how a failing program ended; empty if it exited with status 0 and no error output."""
    if result.is_timeout:
        return "the time was over"
    lines = result.errors.strip().splitlines()
    return cut(lines[-1], SHOWN_CHARACTERS) if lines else f"status {result.status}" if result.status else ""
