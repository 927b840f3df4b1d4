"""Whether the program in a completion passes the tests of its prompt, in a sandbox."""

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
"""Characters of a test, or of what a program wrote, in a reason."""
FIELD = "rl.reward.code.sandbox"
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
"""Program that runs tests after a program. A test has passed when it is reported with a token that the program does not
know: one that ends the interpreter, or writes what it likes, has passed none."""


def code_function(config: CodeConfig, answer_pattern: str) -> RewardFunction:
    """Return the function of the part `code`; ConfigError where no sandbox works on this machine."""
    limits = SandboxLimits(time_s=config.timeout_s, memory_mib=config.memory_mib, output_kib=OUTPUT_KIB)
    sandbox = Sandbox(config.sandbox, field=FIELD, limits=limits, python=config.python)
    return partial(passes_tests, sandbox=sandbox, config=config, answer_pattern=answer_pattern)


def passes_tests(
    scored: RewardInput, *, sandbox: Sandbox, config: CodeConfig, answer_pattern: str
) -> tuple[float, str]:
    """Return 1 when the program of a completion passes all tests, else 0, or the fraction that passes; and what became
    of the first one that failed.

    Raises:
        ValueError: the prompt has no tests, or none in a form that `rl.reward.code.tests_field` names.
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
    """Return the program of a completion: what `answer_pattern` finds, or the last fenced block, or all of it."""
    if answer_pattern:
        return answered(completion, answer_pattern)
    blocks = CODE_BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def tests_of(fields: Mapping[str, Any], name: str) -> list[str] | list[tuple[str, str]]:
    """Return the tests of a prompt, at least one: texts of Python, or pairs of input and output."""
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
    """Return what a program reads or writes: a text as it is, each entry of a list on a line, nothing for null."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _run_asserts(program: str, tests: list[str], sandbox: Sandbox) -> tuple[int, str]:
    """Return the number of tests that pass, and the reason why the first one of the others does not."""
    token = secrets.token_hex(16)
    given = json.dumps({"program": program, "tests": tests, "token": token})
    result = sandbox.run(RUN_TESTS, given)
    passed = {line.partition(" ")[2] for line in result.output.splitlines() if line.startswith(f"{token} ")}
    failed = [index for index in range(len(tests)) if str(index) not in passed]
    if not failed:
        return len(tests), ""
    return len(passed), f"test {failed[0] + 1}: {_ended(result) or 'not reached'}"


def _wrong_output(program: str, given: str, wanted: str, sandbox: Sandbox, deadline: float) -> str | None:
    """Return what is wrong with the program's output for an input; None: it is as wanted, apart from white space at the
    ends of lines and of the text.
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
    """Return how a program ended that did not pass; empty where it says nothing."""
    if result.is_timeout:
        return "the time was over"
    lines = result.errors.strip().splitlines()
    return cut(lines[-1], SHOWN) if lines else f"status {result.status}" if result.status else ""
