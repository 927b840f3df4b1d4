"""Reward for code: run the program in a completion against its prompt's tests, in a sandbox."""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mcore_rl.config.rl.reward import CodeConfig
from mcore_rl.rl.rewards.interface import RewardFunction, RewardInput
from mcore_rl.rl.rewards.rules import answered
from mcore_rl.rl.rewards.sandbox import ProgramResult, Sandbox, SandboxLimits
from mcore_rl.rl.workers.failure import cut

CODE_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
"""Fenced block of Markdown."""
SHOWN = 200
"""Maximum number of characters of a test, or of a program's output, in a reason."""
OUTPUT_KIB = 1024
RUN_TESTS = """
def run():
    import json, os, sys, traceback
    write, given = os.write, json.loads(sys.stdin.buffer.read())
    passed, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0), os.dup2(nowhere, 1)
    names = {"__name__": "program"}
    exec(compile(given["program"], "program.py", "exec"), names)
    for index, test in enumerate(given["tests"]):
        try:
            exec(compile(test, f"test {index + 1}", "exec"), names)
        except BaseException as error:
            traceback.print_exception(type(error), error, error.__traceback__.tb_next)
        else:
            write(passed, f"{given['token']} {index}\\n".encode())
run()
"""
"""Program that runs the model's program and then the tests. A test counts as passed when it is reported with a token
that the model's program does not know, so a program that exits early or prints arbitrary text passes no test."""


def code_function(config: CodeConfig, answer_pattern: str) -> RewardFunction:
    """Return the reward function of the part `code`. Raises ConfigError if no sandbox works on this machine."""
    limits = SandboxLimits(time_s=config.timeout_s, memory_mib=config.memory_mib, output_kib=OUTPUT_KIB)
    sandbox = Sandbox(needed_by="the reward code", limits=limits, python=config.python)
    return partial(passes_tests, sandbox=sandbox, config=config, answer_pattern=answer_pattern)


def passes_tests(
    scored: RewardInput, *, sandbox: Sandbox, config: CodeConfig, answer_pattern: str
) -> tuple[float, str]:
    """Run the tests on a completion's program. Returns the score and how the first failing test failed.

    The score is 1 if all tests pass, else 0; with `rl.reward.code.partial` it is the fraction of tests that pass.

    Raises:
        ValueError: if the prompt's field `rl.reward.code.tests_field` is missing or has no tests in a known form.
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
        f'the prompt\'s field "{name}" is {cut(repr(tests), SHOWN)}; wanted tests: a list of texts of Python, or of '
        '{"input", "output"}'
    )


def _lines(value: Any) -> str:
    """Convert a test's input or output to text: a list becomes one line per entry, null the empty text."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _run_asserts(program: str, tests: list[str], sandbox: Sandbox) -> tuple[int, str]:
    """Return the number of tests that pass, and why the first failing test fails."""
    token = secrets.token_hex(16)
    given = json.dumps({"program": program, "tests": tests, "token": token})
    result = sandbox.run(RUN_TESTS, given)
    passed = {line.partition(" ")[2] for line in result.output.splitlines() if line.startswith(f"{token} ")}
    failed = [index for index in range(len(tests)) if str(index) not in passed]
    if not failed:
        return len(tests), ""
    return len(passed), f"test {failed[0] + 1}: {_ended(result) or 'not reached'}"


def _wrong_output(program: str, given: str, wanted: str, sandbox: Sandbox, deadline: float) -> str | None:
    """Describe how the program's output for an input differs from the expected output; None if it is correct.

    White space at the ends of lines and around the text is ignored.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "the time was over"
    result = sandbox.run(program, given, time_s=left_s)
    if result.status != 0:
        return f"for {cut(given.strip(), SHOWN)!r}: {_ended(result)}"
    if _stripped(result.output) == _stripped(wanted):
        return None
    shown = [cut(text.strip(), SHOWN) for text in (given, result.output, wanted)]
    return f"for {shown[0]!r} the output is {shown[1]!r}, wanted {shown[2]!r}"


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _ended(result: ProgramResult) -> str:
    """Return how a failing program ended; empty if it exited with status 0 and no error output."""
    if result.is_timeout:
        return "the time was over"
    lines = result.errors.strip().splitlines()
    return cut(lines[-1], SHOWN) if lines else f"status {result.status}" if result.status else ""
