"""`mcore-rl problems`: a built-in task's problems with their answers as JSON lines, to fine-tune on or to read."""

import argparse
import json
import random
import string
from pathlib import Path

from rich.console import Console

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.files import written_atomically
from mcore_rl.rl.prompts import TaskProblems, held_out_problems

FIRST_INDEX = 2**32
"""Index of the first problem; reinforcement learning counts its problems from 0, so that these are others."""


def main(args: argparse.Namespace) -> int:
    """Write `args.count` problems to `args.output`."""
    config = load_config(RlRunConfig, Path(args.config), args.overrides)
    prompts, seed = config.rl.prompts, config.train.seed
    if prompts.task == "file":
        raise ConfigError(
            'rl.prompts.task="file": its problems are in rl.prompts.files already. Name a built-in task.'
        )
    held_out = frozenset(problem.prompt for problem in held_out_problems(config.rl.eval, prompts, seed))
    problems = TaskProblems(config=prompts, seed=seed, held_out=held_out)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(args.output) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for index in range(FIRST_INDEX, FIRST_INDEX + args.count):
                problem = problems[index]
                line = {"prompt": problem.prompt, "answer": problem.answer}
                if args.preferences:
                    wrong = wrong_answer(problem.answer, random.Random(f"{seed}/{index}"))
                    line |= {"chosen": problem.answer, "rejected": wrong}
                else:
                    line["response"] = problem.answer
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(
            f"{args.output} cannot be written: {error.strerror}. Choose another --output."
        ) from error
    kind = "pairs of answers to problems" if args.preferences else "problems"
    Console().print(
        f"{args.output}: {args.count} {kind} of {prompts.task}, none of the {len(held_out)} held out for evaluation",
        soft_wrap=True,
    )
    return 0


def wrong_answer(answer: str, generator: random.Random) -> str:
    """Return the answer with one of its digits or letters replaced by another of its kind."""
    places = [
        place for place, character in enumerate(answer) if character in string.digits + string.ascii_lowercase
    ]
    if not places:
        raise DataError(
            f"the answer {answer!r} has neither digit nor small letter to change. Take another task."
        )
    place = generator.choice(places)
    kind = string.digits if answer[place] in string.digits else string.ascii_lowercase
    other = generator.choice([character for character in kind if character != answer[place]])
    return answer[:place] + other + answer[place + 1 :]
