"""Order of the prompts. It depends only on a cursor, so that a resumed run continues with the next prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy

from mcore_rl.config.rl.distill import DistillConfig
from mcore_rl.config.rl.prompts import PromptConfig
from mcore_rl.config.rl.rollout import EvalConfig
from mcore_rl.data.chat import Chat, Conversation, prompt_ids
from mcore_rl.data.mixture import ShuffledSources, refuse_empty_sources
from mcore_rl.data.records import SHOWN
from mcore_rl.errors import DataError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.rollouts.tasks import make_problem, read_problems
from mcore_rl.rl.types import Problem, Prompt

HELD_OUT_SEED = 2**31
"""Offset of the seed of a task's held-out problems, so that they differ from the training problems."""
STRIDE = 2**40
"""Distance from the index of a held-out problem to the index of its replacement; more than any run uses."""
TRIES = 100
"""Attempts to replace a held-out problem, and attempts per held-out problem to find distinct texts."""


class PromptSource(Protocol):
    """The prompts of a run, by index."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts per epoch; 0 if the prompts never end."""

    @property
    def skipped(self) -> str:
        """Description of the prompts that were left out; empty if none were."""

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Return the prompts with indices `cursor` to `cursor + count - 1`; the same on every call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePrompts:
    """Prompts read from files. Each prompt occurs once per epoch, in an order that depends on the seed and the epoch;
    with a mixture, prompts are drawn from the files by weight.
    """

    prompts: tuple[Prompt, ...]
    seed: int
    mixture: ShuffledSources | None
    num_too_long: int
    """Number of prompts left out because they are longer than rl.prompts.max_tokens."""
    bad_lines: tuple[str, ...]
    """File, line and reason of each line that was left out because it is no valid prompt."""
    notes: tuple[str, ...] = ()
    """For each file, a sentence that names the shape of its records, and a warning of keys that are not read."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts per epoch."""
        return len(self.prompts)

    @property
    def skipped(self) -> str:
        """Description of the prompts that were left out; empty if none were."""
        counts = {"longer than rl.prompts.max_tokens": self.num_too_long, "no prompt": len(self.bad_lines)}
        numbers = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        shown = "; ".join(self.bad_lines[:SHOWN])
        return numbers + (f": {shown}" if shown else "")

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Return the prompts with indices `cursor` to `cursor + count - 1`."""
        if self.mixture is not None:
            return [self.prompts[index] for index in self.mixture.items(cursor, count)]
        size = len(self.prompts)
        epochs = range(cursor // size, (cursor + count - 1) // size + 1)
        orders = {e: numpy.random.default_rng((self.seed, e)).permutation(size).tolist() for e in epochs}
        indices = (divmod(index, size) for index in range(cursor, cursor + count))
        return [self.prompts[orders[epoch][index]] for epoch, index in indices]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblems:
    """The problems of a task, by index. No problem has the text of a held-out problem."""

    config: PromptConfig
    seed: int
    held_out: frozenset[str]

    def __getitem__(self, index: int) -> Problem:
        for attempt in range(TRIES):
            problem = make_problem(self.config, self.seed, index + attempt * STRIDE)
            if problem.prompt not in self.held_out:
                return problem
        raise DataError(
            f"of {TRIES} problems of the task, like {problem.prompt!r}, all are held out for evaluation: the task has "
            "too few. Widen rl.prompts.smallest and largest, or lower rl.eval.num_prompts."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPrompts:
    """Endless prompts of a task."""

    problems: TaskProblems
    encode: Callable[[Problem], Prompt]

    @property
    def num_prompts(self) -> int:
        """Zero: the prompts never end."""
        return 0

    @property
    def skipped(self) -> str:
        """Empty: nothing is left out."""
        return ""

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Return the prompts with indices `cursor` to `cursor + count - 1`."""
        return [self.encode(self.problems[index]) for index in range(cursor, cursor + count)]


class PromptEncoder:
    """Encodes problems with the chat template, up to the point where the assistant's answer begins. If a conversation
    ends in a turn of the assistant, that turn is the beginning of the answer, and the policy continues it.
    """

    def __init__(self, chat: Chat, max_tokens: int) -> None:
        self._chat = chat
        self._max_tokens = max_tokens

    def __call__(self, problem: Problem) -> Prompt:
        """Return the prompt of `problem`.

        Raises:
            DataError: if the chat template cannot render it, or it has no tokens.
            PromptTooLongError: if it has more than rl.prompts.max_tokens tokens.
        """
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        try:
            tokens_T = tuple(prompt_ids(self._chat, Conversation(messages=tuple(messages))))
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
    """Raised for a prompt with more tokens than the config allows."""


def train_prompts(
    config: PromptConfig,
    held_out: Sequence[Prompt],
    encode: PromptEncoder,
    seed: int,
    *,
    needs_answer: bool = False,
) -> PromptSource:
    """Return the training prompts. Raises DataError if there are none, or none with an answer if `needs_answer`."""
    if config.task == "file":
        return _file_prompts(config, encode, seed, needs_answer=needs_answer)
    texts = frozenset(prompt.problem.prompt for prompt in held_out)
    return TaskPrompts(problems=TaskProblems(config=config, seed=seed, held_out=texts), encode=encode)


def refuse_prompts_without_teacher(source: PromptSource, distill: DistillConfig) -> None:
    """Raise a DataError that lists the prompts without a teacher for their tag, if any."""
    if distill.teacher is not None:
        return
    prompts = source.prompts if isinstance(source, FilePrompts) else source.take(0, 1)
    lacking = [
        prompt.problem
        for prompt in prompts
        if distill.index_of(prompt.problem.fields.get(distill.tag_field)) is None
    ]
    if lacking:
        shown = ", ".join(
            f"{problem.problem_id} ({distill.tag_field}={problem.fields.get(distill.tag_field)!r})"
            for problem in lacking[:SHOWN]
        )
        raise DataError(
            f"{len(lacking)} prompts have no teacher of {', '.join(distill.teachers)}: {shown}. Correct their tags, or "
            "name rl.distill.teacher, which teaches all other prompts."
        )


def held_out_problems(config: EvalConfig, prompts: PromptConfig, seed: int) -> tuple[Problem, ...]:
    """Return problems of a task to evaluate on, with distinct texts; fewer if the task does not have enough."""
    by_text: dict[str, Problem] = {}
    for index in range(TRIES * config.num_prompts):
        problem = make_problem(prompts, seed + HELD_OUT_SEED, index)
        by_text.setdefault(problem.prompt, problem)
        if len(by_text) == config.num_prompts:
            break
    return tuple(by_text.values())


def held_out_prompts(
    config: EvalConfig, prompts: PromptConfig, encode: PromptEncoder, seed: int, *, needs_answer: bool = False
) -> tuple[Prompt, ...]:
    """Return the prompts to evaluate on; empty if training prompts come from files and `config.files` is empty."""
    if prompts.task != "file":
        return tuple(map(encode, held_out_problems(config, prompts, seed)))
    if not config.files:
        return ()
    of_files = prompts.model_copy(update={"files": config.files, "file_weights": ()})
    return _file_prompts(of_files, encode, seed, needs_answer=needs_answer).prompts[: config.num_prompts]


def _file_prompts(
    config: PromptConfig, encode: PromptEncoder, seed: int, *, needs_answer: bool
) -> FilePrompts:
    read = read_problems(config, needs_answer=needs_answer)
    prompts, sizes, num_too_long = [], [0] * len(config.files), 0
    files = (file for file, count in enumerate(read.num_per_file) for _ in range(count))
    for file, problem in zip(files, read.problems, strict=True):
        try:
            prompts.append(encode(problem))
        except PromptTooLongError as error:
            num_too_long += 1
            longest = error
        else:
            sizes[file] += 1
    if not prompts:
        raise DataError(f"all {num_too_long} prompts are too long: {longest}")
    weights = config.file_weights
    refuse_empty_sources("rl.prompts.file_weights", weights, config.files, sizes)
    return FilePrompts(
        prompts=tuple(prompts),
        seed=seed,
        mixture=ShuffledSources(sizes, weights, seed) if weights else None,
        num_too_long=num_too_long,
        bad_lines=read.bad_lines,
        notes=read.notes,
    )


def own_positions(num_prompts: int, mesh: Mesh) -> range:
    """Return the positions of this replica's prompts among `num_prompts` prompts."""
    # Generation does not split sequences, so every context-parallel rank generates as a separate replica.
    return range(mesh.dp_cp.rank, num_prompts, mesh.dp_cp.size)
