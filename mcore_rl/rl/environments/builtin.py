"""The built-in environments: tools that the policy calls, a game, and other packages' problems and games."""

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

from mcore_rl.config.extension import optional_package
from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.rewards.rules import MAX_EXPRESSION, OPERATORS, last_number
from mcore_rl.rl.rewards.sandbox import Sandbox, SandboxLimits
from mcore_rl.rl.types import Problem
from mcore_rl.rl.workers import cut


class Tool:
    """An environment around a text function. A turn without a call is the answer and ends the conversation. The
    environment's own reward is 0: the answer is scored by the other parts of rl.reward.
    """

    def __init__(self, run: Callable[[str], str], *, begin: str, end: str, help: str, role: str) -> None:
        """Take a function from a call to its result or error, the marks around a call (empty `end`: the end of the
        turn), a system message (may be empty), and the role of results.
        """
        self._run, self._begin, self._end, self._help, self._role = run, begin, end, help, role

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Return the prompt, preceded by the system message if `help` is not empty."""
        messages = prompt.messages or ({"role": "user", "content": prompt.prompt},)
        return (*([{"role": "system", "content": self._help}] if self._help else []), *messages)

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Return the result of the last call in the turn; without a call the conversation ends."""
        _, mark, rest = completion.rpartition(self._begin)
        if not mark:
            return [], 0.0, True
        call = rest.partition(self._end)[0] if self._end else rest
        return [{"role": self._role, "content": self._run(call.strip())}], 0.0, False


class Calculator(Tool):
    """A tool that evaluates arithmetic expressions (+ - * /) exactly."""

    def __init__(
        self,
        begin: str = "<calculator>",
        end: str = "</calculator>",
        help: str = (
            "You can compute: write an expression with + - * / and parentheses between <calculator> and </calculator>, "
            "end your turn, and read the result. Then write the answer alone."
        ),
        role: str = "tool",
    ) -> None:
        super().__init__(computed, begin=begin, end=end, help=help, role=role)


def computed(expression: str) -> str:
    """Return the value of an arithmetic expression as an integer or a fraction, or "error: ..." if it is invalid."""
    if len(expression) > MAX_EXPRESSION:
        return f"error: longer than {MAX_EXPRESSION} characters"
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("no arithmetic")


HELP = (
    "You can run Python: write a program between ```python and ```, end your turn, and read what it prints. Each "
    "program begins anew. When you know the answer, write it without a program."
)


class PythonTool(Tool):
    """A tool that runs a Python program and returns its output."""

    def __init__(
        self,
        begin: str = "```python",
        end: str = "```",
        help: str = HELP,
        role: str = "tool",
        seconds: float = 5.0,
        memory_mib: int = 512,
        max_characters: int = 2000,
    ) -> None:
        """Create the tool and try its sandbox. A program has `seconds` (keep it below rl.environment.timeout_s), and
        `memory_mib` MiB of address space and of file sizes; a result over `max_characters` is cut in the middle. Raises
        ConfigError if this machine has no working sandbox.
        """
        limits = SandboxLimits(time_s=float(seconds), memory_mib=memory_mib)
        run = partial(run_program, limits=limits, max_characters=max_characters)
        super().__init__(run, begin=begin, end=end, help=help, role=role)
        sandbox_of(limits)


@functools.cache
def sandbox_of(limits: SandboxLimits) -> Sandbox:
    """Return this machine's sandbox. It is tried once, and worker processes inherit it."""
    return Sandbox(needed_by='rl.environment.name="python"', limits=limits)


def run_program(program: str, *, limits: SandboxLimits, max_characters: int) -> str:
    """Run a program in the sandbox. Returns its output and errors, and how it ended unless it succeeded."""
    result = sandbox_of(limits).run(program)
    if result.is_timeout:
        ended = f"(ended after {limits.time_s:g} s)"
    else:
        ended = f"(ended with status {result.status})" if result.status else ""
    printed = cut(f"{result.output}{result.errors}".strip(), max_characters)
    return "\n".join(filter(None, (printed, ended))) or "(no output)"


class Guessing:
    """Guess a number below 10 ** size, drawn with the seed (rl.prompts.task="seeds"). The right guess has reward 1."""

    def __init__(
        self, guesses: int = 8, prompt: str = "I have a number from 0 to {largest}. Guess it: write a number alone."
    ) -> None:
        """Take the number of guesses, and the prompt, in which {largest} becomes the largest possible number."""
        self._left = guesses
        self._prompt = prompt
        self._secret = -1

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Draw the number and return the prompt."""
        end = 10 ** prompt.fields["size"]
        self._secret = Random(prompt.fields["seed"]).randrange(end)
        return [{"role": "user", "content": self._prompt.replace("{largest}", str(end - 1))}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Compare the last number of the turn with the secret number."""
        guess = last_number(completion)
        if guess == self._secret:
            return [], 1.0, True
        self._left -= 1
        hint = "no number" if guess is None else "higher" if guess < self._secret else "lower"
        return [{"role": "user", "content": hint}], 0.0, self._left <= 0


ANSWER_HELP = "Give your final answer between <answer> and </answer>."


class ReasoningGym:
    """A dataset's problem for the prompt's seed (rl.prompts.task="seeds"). The reward is the verifier's score, from 0
    to 1, of the text between <answer> and </answer>.
    """

    def __init__(self, dataset: str, help: str = ANSWER_HELP, **settings: str | bool | int | float) -> None:
        """Take a dataset, such as "chain_sum", a system message (may be empty), and its config's fields."""
        self._name, self._help, self._settings = dataset, help, settings
        self._seed = 0
        _reasoning_gym()

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Generate the problem."""
        self._seed = prompt.fields["seed"]
        _, entry = self._problem()
        system = [{"role": "system", "content": self._help}] if self._help else []
        return [*system, {"role": "user", "content": entry["question"]}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Score the answer."""
        dataset, entry = self._problem()
        answer = _reasoning_gym(".utils").extract_answer(completion)
        return [], float(dataset.score_answer(answer, entry)), True

    def _problem(self) -> tuple[Any, Mapping[str, Any]]:
        """Recreate the dataset and problem from the seed: not every dataset can be pickled between calls."""
        dataset = _reasoning_gym().create_dataset(self._name, size=1, seed=self._seed, **self._settings)
        return dataset, dataset[0]


def _reasoning_gym(part: str = "") -> Any:
    return optional_package(f"reasoning_gym{part}", 'rl.environment.name="reasoning_gym"', "'mcore-rl[environments]'")


class TextArena:
    """A game set up from the seed (rl.prompts.task="seeds"), with its own reward at its end. Games cannot be pickled,
    so the moves so far are replayed before each move.
    """

    def __init__(self, game: str) -> None:
        """Create the environment of a game, given by its name, for example "GuessTheNumber-v0"."""
        self._game = game
        self._seed = 0
        self._moves: list[str] = []
        _textarena()

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Set up the game and return its first observation."""
        self._seed = prompt.fields["seed"]
        _, text = self._played()
        return [{"role": "user", "content": text}]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Make a move and return the new part of the game's observation."""
        game, before = self._played()
        self._moves.append(completion)
        is_done, _ = game.step(action=completion)
        if is_done:
            rewards, _ = game.close()
            return [], float(rewards[0]), True
        # An observation repeats all earlier observations, which are already in the conversation.
        return [{"role": "user", "content": _observation(game).removeprefix(before).strip()}], 0.0, False

    def _played(self) -> tuple[Any, str]:
        game = _textarena().make(self._game)
        game.reset(num_players=1, seed=self._seed)
        text = _observation(game)
        for move in self._moves:
            game.step(action=move)
            text = _observation(game)
        return game, text


def _observation(game: Any) -> str:
    _, text = game.get_observation()
    return str(text)


def _textarena() -> Any:
    return optional_package("textarena", 'rl.environment.name="textarena"', "'mcore-rl[environments]'")
