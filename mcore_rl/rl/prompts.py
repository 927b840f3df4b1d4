"""Which prompt comes when: by a cursor alone, so that a run that resumes goes on where it was."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy

from mcore_rl.config.rl import EvalConfig, PromptConfig
from mcore_rl.data.chat import Chat, Conversation
from mcore_rl.errors import DataError
from mcore_rl.rl.tasks import ProblemFile, make_problem, read_problems
from mcore_rl.rl.types import Problem, Prompt

HELD_OUT_SEED = 2**31
"""Added to the seed of a built-in task: of problems to evaluate on."""
STRIDE = 2**40
"""From a problem that is held out to the one that takes its place; more than any run counts."""
TRIES = 100


class PromptSource(Protocol):
    """The prompts of a run, by number."""

    @property
    def num_prompts(self) -> int:
        """0: without end."""

    @property
    def skipped(self) -> str:
        """What was left out, in words; empty: nothing."""

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Those numbered `cursor` to `cursor + count - 1`: always the same."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePrompts:
    """Prompts of files, each once an epoch, in an order of the seed and the epoch."""

    prompts: tuple[Prompt, ...]
    seed: int
    num_too_long: int
    """Left out: longer than rl.prompts.max_tokens."""
    num_bad_lines: int

    @property
    def num_prompts(self) -> int:
        """See PromptSource."""
        return len(self.prompts)

    @property
    def skipped(self) -> str:
        """See PromptSource."""
        counts = {"longer than rl.prompts.max_tokens": self.num_too_long, "no prompt": self.num_bad_lines}
        return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """See PromptSource."""
        size = len(self.prompts)
        epochs = range(cursor // size, (cursor + count - 1) // size + 1)
        orders = {e: numpy.random.default_rng((self.seed, e)).permutation(size).tolist() for e in epochs}
        places = (divmod(number, size) for number in range(cursor, cursor + count))
        return [self.prompts[orders[epoch][place]] for epoch, place in places]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblems:
    """The problems of a built-in task, by number; none has the text of one that is held out."""

    config: PromptConfig
    seed: int
    held_out: frozenset[str]

    def __getitem__(self, number: int) -> Problem:
        for attempt in range(TRIES):
            problem = make_problem(self.config, self.seed, number + attempt * STRIDE)
            if problem.prompt not in self.held_out:
                return problem
        raise DataError(
            f"of {TRIES} problems of the task, like {problem.prompt!r}, all are held out for evaluation: the task has "
            "too few. Widen rl.prompts.smallest and largest, or lower rl.eval.num_prompts."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPrompts:
    """Prompts of a built-in task without end."""

    problems: TaskProblems
    encode: Callable[[Problem], Prompt]

    @property
    def num_prompts(self) -> int:
        """See PromptSource."""
        return 0

    @property
    def skipped(self) -> str:
        """See PromptSource."""
        return ""

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """See PromptSource."""
        return [self.encode(self.problems[number]) for number in range(cursor, cursor + count)]


class PromptEncoder:
    """Problems to tokens, as the chat template has a user's turn before the assistant's answer."""

    def __init__(self, chat: Chat, max_tokens: int) -> None:
        self._chat = chat
        self._max_tokens = max_tokens

    def __call__(self, problem: Problem) -> Prompt:
        """DataError for one that is longer than rl.prompts.max_tokens."""
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        try:
            tokens_T = tuple(self._chat.prompt(Conversation(messages=tuple(messages))))
        except DataError as error:
            raise DataError(f"prompt {problem.problem_id}: {error}") from error
        if not tokens_T:
            raise DataError(
                f"prompt {problem.problem_id} has no tokens. Take it out, or use another template."
            )
        if len(tokens_T) > self._max_tokens:
            raise PromptTooLongError(
                f"prompt {problem.problem_id} has {len(tokens_T)} tokens, more than rl.prompts.max_tokens="
                f"{self._max_tokens}. Raise it, or make shorter prompts."
            )
        return Prompt(problem=problem, tokens_T=tokens_T)


class PromptTooLongError(DataError):
    """A prompt of more tokens than the config allows."""


def train_prompts(
    config: PromptConfig, held_out: Sequence[Prompt], encode: PromptEncoder, seed: int
) -> PromptSource:
    """What a run learns from; DataError when there is nothing."""
    if config.task == "file":
        return _file_prompts(read_problems(config), encode, seed)
    texts = frozenset(prompt.problem.prompt for prompt in held_out)
    return TaskPrompts(problems=TaskProblems(config=config, seed=seed, held_out=texts), encode=encode)


def held_out_problems(config: EvalConfig, prompts: PromptConfig, seed: int) -> tuple[Problem, ...]:
    """Problems of a built-in task to evaluate on, of different texts; fewer when the task has not so many."""
    made: dict[str, Problem] = {}
    for number in range(TRIES * config.num_prompts):
        problem = make_problem(prompts, seed + HELD_OUT_SEED, number)
        made.setdefault(problem.prompt, problem)
        if len(made) == config.num_prompts:
            break
    return tuple(made.values())


def held_out_prompts(
    config: EvalConfig, prompts: PromptConfig, encode: PromptEncoder, seed: int
) -> tuple[Prompt, ...]:
    """The prompts of an evaluation; none when files are trained on and none are named for it."""
    if prompts.task != "file":
        return tuple(map(encode, held_out_problems(config, prompts, seed)))
    if not config.files:
        return ()
    read = read_problems(prompts.model_copy(update={"files": config.files}))
    return _file_prompts(read, encode, seed).prompts[: config.num_prompts]


def _file_prompts(read: ProblemFile, encode: PromptEncoder, seed: int) -> FilePrompts:
    prompts, num_too_long = [], 0
    for problem in read.problems:
        try:
            prompts.append(encode(problem))
        except PromptTooLongError as error:
            num_too_long += 1
            longest = error
    if not prompts:
        raise DataError(f"all {num_too_long} prompts are too long: {longest}")
    return FilePrompts(
        prompts=tuple(prompts), seed=seed, num_too_long=num_too_long, num_bad_lines=len(read.bad_lines)
    )
