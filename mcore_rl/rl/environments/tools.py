"""Tools: the policy calls a tool between two marks; a turn without a call is its answer."""

import ast
from collections.abc import Callable, Sequence
from fractions import Fraction

from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.rewards.rules import MAX_EXPRESSION, OPERATORS
from mcore_rl.rl.types import Problem


class Tool:
    """An environment around a text function. A turn without a call is the answer and ends the conversation.

    The environment's own reward is 0: the answer is scored by the other parts of rl.reward.
    """

    def __init__(self, run: Callable[[str], str], *, begin: str, end: str, help: str, role: str) -> None:
        """Create the tool.

        Args:
            run: function that returns the result of a call, or a line that describes the error.
            begin: mark before a call.
            end: mark after a call; empty: the call extends to the end of the turn.
            help: text of a system message before the prompt; empty: no system message.
            role: role of the messages with results.
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
        """Create the tool; see `Tool` for the arguments."""
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
