"""Problems with answers that can be verified: made by a rule, or read from files."""

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.prompts import PromptConfig
from mcore_rl.data.records import Record, beyond_max, filled, listed, read_records
from mcore_rl.data.shapes import read_turns, recognise
from mcore_rl.errors import DataError
from mcore_rl.rl.types import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class BadPromptLine:
    """A line of a prompt file that is not a prompt, and the reason."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        """Return file, line and reason."""
        return f"{self.file}:{self.line}: {self.reason}."


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemFile:
    """Contents of prompt files."""

    problems: tuple[Problem, ...]
    num_per_file: tuple[int, ...]
    """Number of the problems that are of each file, in the order of the files."""
    bad_lines: tuple[BadPromptLine, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblem:
    """Problem of a task, before it has an identity."""

    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further values that reward functions need."""


def make_problem(config: PromptConfig, seed: int, index: int) -> Problem:
    """Return a problem of a task, which is always the same for the same task, sizes, seed and index."""
    generator = random.Random(f"{config.task}/{config.smallest}-{config.largest}/{seed}/{index}")
    size = generator.randint(config.smallest, config.largest)
    make = TASKS.get(config.task) or load_extension("rl.prompts.task", config.task)
    problem: TaskProblem = make(generator, size)
    return Problem(
        problem_id=f"{config.task}/{seed}/{index}",
        prompt=problem.prompt,
        answer=problem.answer,
        fields=problem.fields,
    )


def read_problems(config: PromptConfig, *, needs_answer: bool = False) -> ProblemFile:
    """Read all lines of `config.files`, in order.

    Args:
        needs_answer: whether a part of the reward compares with the reference answer (`ANSWER_PARTS`): a line without
            one is then no prompt.

    Raises:
        DataError: where no line of a file is a prompt, or more than `config.max_bad` lines are none.
    """
    problems: list[Problem] = []
    bad_lines: list[BadPromptLine] = []
    num_per_file: list[int] = []
    for name in config.files:
        before = len(problems)
        for record in read_records(name):
            number = record.line
            read = _read_record(record, name, config, needs_answer)
            if isinstance(read, Problem):
                problems.append(read)
            else:
                bad_lines.append(BadPromptLine(file=name, line=number, reason=read))
        num_per_file.append(len(problems) - before)
        if not num_per_file[-1]:
            of_this = [bad for bad in bad_lines if bad.file == name]
            first = f" Line {of_this[0].line}: {of_this[0].reason}." if of_this else ""
            raise DataError(
                f"{name} holds no prompt in {len(of_this)} lines.{first} Wanted: lines with "
                f"{config.prompt_field!r} and {config.answer_field!r} (rl.prompts.prompt_field, answer_field)."
            )
    if beyond := beyond_max([str(bad) for bad in bad_lines], config.max_bad):
        raise DataError(f"{listed(beyond)}\nCorrect them, or allow them with rl.prompts.max_bad.")
    return ProblemFile(problems=tuple(problems), num_per_file=tuple(num_per_file), bad_lines=tuple(bad_lines))


def _read_record(record: Record, name: str, config: PromptConfig, needs_answer: bool) -> Problem | str:
    """Return the problem of a line, or the reason why it is none. Where the line lacks the field "prompt", it is
    recognised by its keys.
    """
    if record.entry is None:
        return record.problem
    entry, number = dict(record.entry), record.line
    if config.prompt_template is not None:
        try:
            entry[config.prompt_field] = filled(config.prompt_template, entry)
        except DataError as error:
            return str(error)
    is_named = config.prompt_field != PromptConfig.model_fields["prompt_field"].default
    try:
        if config.prompt_field not in entry and not is_named and (dialogue := recognise(entry)):
            entry[config.prompt_field] = dialogue.prompt
            entry.setdefault(config.answer_field, dialogue.answer)
        prompt, answer = entry.pop(config.prompt_field, None), entry.pop(config.answer_field, "")
        messages = tuple(read_turns(prompt, config.prompt_field)) if isinstance(prompt, list) else ()
    except DataError as error:
        return str(error)
    if messages:
        prompt = messages[-1].get("content")
    if not isinstance(prompt, str) or not prompt.strip():
        return f"no text in {config.prompt_field!r} (other keys: {', '.join(entry) or 'none'})"
    if needs_answer and (answer is None or not str(answer).strip()):
        keys = ", ".join(entry) or "none"
        return f"no answer in {config.answer_field!r}, with which the reward compares (other keys: {keys})"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"{config.answer_field!r} holds {json.dumps(answer)[:40]}, neither text nor a number"
    problem_id = f"{Path(name).name}:{number}"
    return Problem(problem_id=problem_id, prompt=prompt, answer=str(answer), messages=messages, fields=entry)


def _arithmetic(generator: random.Random, size: int) -> TaskProblem:
    """Two numbers of `size` digits, added, subtracted or multiplied."""
    left, right = (generator.randrange(10 ** (size - 1), 10**size) for _ in range(2))
    sign = generator.choice("+-*")
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return TaskProblem(prompt=f"{left} {sign} {right} =", answer=str(value))


def _sorting(generator: random.Random, size: int) -> TaskProblem:
    """`size` digits in ascending order."""
    digits = [generator.randrange(10) for _ in range(size)]
    return TaskProblem(prompt=f"sort {_spaced(digits)}:", answer=_spaced(sorted(digits)))


def _copying(generator: random.Random, size: int) -> TaskProblem:
    """`size` letters as they are."""
    letters = "".join(generator.choices(string.ascii_lowercase, k=size))
    return TaskProblem(prompt=f"copy {letters}:", answer=letters)


def _reversing(generator: random.Random, size: int) -> TaskProblem:
    """`size` digits from the last to the first."""
    digits = "".join(generator.choices(string.digits, k=size))
    return TaskProblem(prompt=f"{digits}=", answer=digits[::-1])


def _countdown(generator: random.Random, size: int) -> TaskProblem:
    """`size` numbers that make a target with + - * /; the answer is one of the ways."""
    numbers = [generator.randint(1, 25) for _ in range(size)]
    expression, value = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        sign = generator.choice([sign for sign in "+-*/" if sign != "/" or value % number == 0])
        value = {
            "+": value + number,
            "-": value - number,
            "*": value * number,
            "/": value // number,
        }[sign]
        expression = f"({expression} {sign} {number})"
    shown = generator.sample(numbers, size)
    return TaskProblem(
        prompt=f"make {value} from {_spaced(shown)}:",
        answer=expression[1:-1],
        fields={"numbers": shown, "target": value},
    )


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _seeds(generator: random.Random, size: int) -> TaskProblem:
    """A number from which an environment makes a problem of this size; both are fields of the problem."""
    seed = generator.getrandbits(31)
    return TaskProblem(prompt=f"problem {seed}", answer="", fields={"seed": seed, "size": size})


TASKS: dict[str, Callable[[random.Random, int], TaskProblem]] = {
    "arithmetic": _arithmetic,
    "sorting": _sorting,
    "copying": _copying,
    "reversing": _reversing,
    "countdown": _countdown,
    "seeds": _seeds,
}
