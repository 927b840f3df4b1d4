"""`mcore-rl problems` writes problems of a built-in task; `mcore-rl reward` scores completions without a model."""

import argparse
import json
import random
import string
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console

from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.programs.rollouts import load_prompts
from mcore_rl.rl.rewards.score import ANSWER, FailureReport, Reward, Scores, refuse_failing_trial, trial_groups
from mcore_rl.rl.rollouts.prompts import TaskProblems, held_out_problems
from mcore_rl.rl.types import Problem
from mcore_rl.storage.files import refuse_replacing, written_atomically
from mcore_rl.storage.run_config import load_run_config

FIRST_INDEX = 2**32
"""Index of the first problem. Reinforcement learning counts from 0, so the problems differ."""
FIRST_VALID_INDEX = 2**33
SHOWN = 400
FAILED_STATUS = 1


def write_problems(args: argparse.Namespace) -> int:
    """Write `args.count` problems to `args.output`, and `args.valid` different problems to a second file."""
    config = load_run_config(RlRunConfig, Path(args.config), args.overrides)
    prompts, seed = config.rl.prompts, config.train.seed
    if prompts.task == "file":
        raise ConfigError('rl.prompts.task="file": its problems are in rl.prompts.files already. Name a built-in task.')
    if args.faults != "character" and not args.preferences:
        raise ConfigError(
            f"--faults {args.faults} without --preferences: problems have no wrong answers. Add --preferences."
        )
    if args.cut_fraction and args.preferences:
        raise ConfigError(
            f"--cut-fraction {args.cut_fraction} with --preferences: pairs have --faults. Leave one of both out."
        )
    held_out = frozenset(problem.prompt for problem in held_out_problems(config.rl.eval, prompts, seed))
    kind = "pairs of answers to problems" if args.preferences else "problems"
    # Validation problems are chosen first, and no training problem has the text of any of them.
    valid = TaskProblems(config=prompts, seed=seed, held_out=held_out)
    to_validate = [valid[index] for index in range(FIRST_VALID_INDEX, FIRST_VALID_INDEX + args.valid)]
    problems = TaskProblems(config=prompts, seed=seed, held_out=held_out | {problem.prompt for problem in to_validate})
    to_learn = [problems[index] for index in range(FIRST_INDEX, FIRST_INDEX + args.count)]

    def line(problem: Problem) -> dict[str, str]:
        if args.preferences:
            return line_of_pair(problem, seed, args.faults)
        is_cut = random.Random(f"{seed}/{problem.problem_id}").random() < args.cut_fraction
        response = problem.answer[:-1] if is_cut else problem.answer
        return {"prompt": problem.prompt, "answer": problem.answer, "response": response}

    files = {args.output: list(map(line, to_learn))}
    valid_path = args.output.with_stem(f"{args.output.stem}_valid")
    if args.valid:
        files[valid_path] = list(map(line, to_validate))
    for path, lines in files.items():
        _refuse_other(path, lines, Path(args.config))
    for path, lines in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_atomically(path) as unfinished, unfinished.open("wb") as file:
                file.writelines(map(_encoded, lines))
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}. Choose another --output.") from error
    text = f"{args.output}: {args.count} {kind} of {prompts.task}, none of the {len(held_out)} held out for evaluation"
    if args.valid:
        text += f"\n{valid_path}: {args.valid} others to validate on"
    Console().print(text, soft_wrap=True)
    return 0


def line_of_pair(problem: Problem, seed: int, faults: str) -> dict[str, str]:
    """Return a problem as a line with its answer and a wrong answer, which depends on `seed`: one character replaced if
    `faults` is "character", else one of FAULTS with equal probability. DataError without a digit or lowercase letter.
    """
    generator = random.Random(f"{seed}/{problem.problem_id}")
    if faults == "character":
        wrong = replaced(problem.answer, generator)
    else:
        wrong = problem.answer
        while wrong == problem.answer:  # equal neighbours may be swapped
            wrong = generator.choice(FAULTS)(problem.answer, generator)
    return {"prompt": problem.prompt, "answer": problem.answer, "chosen": problem.answer, "rejected": wrong}


def _refuse_other(path: Path, lines: Sequence[dict[str, str]], config: Path) -> None:
    """Raise a ConfigError if the file exists with other lines, because they might be the user's own."""

    def other(path: Path) -> str | None:
        with path.open("rb") as file:
            is_same = all(old == new for old, new in zip_longest(file, map(_encoded, lines)))
        return None if is_same else "has other lines than these problems"

    refuse_replacing(path, [("CONFIG", config)], overwrite=True, foreign=other)


def _encoded(line: dict[str, str]) -> bytes:
    return (json.dumps(line, ensure_ascii=False) + "\n").encode()


def replaced(answer: str, generator: random.Random) -> str:
    """Return the answer with a digit or letter replaced by another of its kind."""
    place = _place(answer, generator)
    other = generator.choice([character for character in _kind(answer[place]) if character != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def left_out(answer: str, generator: random.Random) -> str:
    """Return the answer with a digit or letter removed; a single character stays."""
    place = _place(answer, generator)
    return answer[:place] + answer[place + 1 :] or answer


def added(answer: str, generator: random.Random) -> str:
    """Return the answer with a digit or letter added."""
    place = _place(answer, generator)
    return answer[:place] + generator.choice(_kind(answer[place])) + answer[place:]


def swapped(answer: str, generator: random.Random) -> str:
    """Return the answer with a digit or letter and the next character swapped."""
    place = _place(answer, generator)
    return answer[:place] + answer[place : place + 2][::-1] + answer[place + 2 :]


def random_text(answer: str, generator: random.Random) -> str:
    """Return up to twice as many random characters as the answer has, of the kind of a digit or letter in it."""
    kind = _kind(answer[_place(answer, generator)])
    return "".join(generator.choices(kind, k=generator.randint(1, 2 * len(answer))))


FAULTS = (replaced, left_out, added, swapped, random_text)


def _place(answer: str, generator: random.Random) -> int:
    places = [place for place, character in enumerate(answer) if _kind(character)]
    if not places:
        raise DataError(f"the answer {answer!r} has neither digit nor small letter to change. Take another task.")
    return generator.choice(places)


def _kind(character: str) -> str:
    return next((kind for kind in (string.digits, string.ascii_lowercase) if character in kind), "")


def score_completions(args: argparse.Namespace) -> int:
    """Print scores of completions of `args.sample` prompts; return 0, or 1 if a score failed."""
    config = load_run_config(RlRunConfig, Path(args.config), args.overrides)
    check_rl(config, config.mesh.smallest_world)
    prompts = load_prompts(config)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    groups = trial_groups(prompts.train.take(0, args.sample), prompts.tokenizer.encode, args.completion or ANSWER)
    functions = config.rl.reward.scored_by_functions
    if functions is None:
        raise ConfigError(
            f"rl.reward.parts={list(config.rl.reward.parts)} are models or an environment alone, which score only in a "
            "run. Name a function beside them, or start the run."
        )
    if others := [part for part in config.rl.reward.parts if part not in functions.parts]:
        console.print(f"without {', '.join(others)}: reward models and environments score only in a run")
    with Reward(functions, max_new_tokens=config.rl.rollout.max_new_tokens) as reward:
        scores = reward(groups)
    for p, group in enumerate(groups):
        problem = group.prompt.problem
        console.print(f"{problem.problem_id}: {_short(problem.prompt)}")
        console.print(f"  reference: {_short(problem.answer) or 'none'}")
        for g, completion in enumerate(group.completions):
            whose = "with its reference" if g == 0 else "with another's"
            console.print(f"  {whose}: {_short(completion.text)}")
            console.print(f"    {_scored(scores, p, g)}")
    refuse_failing_trial(scores, functions)
    FailureReport(console.print, folder=None).add(scores.failures)
    return FAILED_STATUS if scores.failures else 0


def _scored(scores: Scores, p: int, g: int) -> str:
    reasons = scores.reasons_PG[p][g]
    parts = [
        f"{name} {_number(values_PG[p, g].item())}" + (f" ({reasons[name]})" if name in reasons else "")
        for name, values_PG in scores.parts.items()
    ]
    return f"reward {_number(scores.rewards_PG[p, g].item())} = {' | '.join(parts)}"


def _number(value: float) -> str:
    return "failed" if value != value else f"{value:.3f}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else f"{flat[:SHOWN]} … ({len(flat) - SHOWN} characters more)"
