"""`mcore-rl reward`: score completions of an RL config's prompts with its reward, without a model."""

import argparse
from pathlib import Path

from rich.console import Console

from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.programs.rollouts import load_prompts
from mcore_rl.rl.rewards.score import (
    ANSWER,
    FailureReport,
    Reward,
    Scores,
    refuse_failing_trial,
    trial_groups,
)
from mcore_rl.storage.run_config import load_run_config

SHOWN = 400
"""Number of characters to show of a prompt or reference."""
FAILED_STATUS = 1
"""Exit status if a score failed."""


def main(args: argparse.Namespace) -> int:
    """Score completions of the first `args.sample` prompts and print them with prompt and reference.

    Returns:
        0, or 1 if a score failed. A part that always fails raises TrainingError.
    """
    config = load_run_config(RlRunConfig, Path(args.config), args.overrides)
    check_rl(config, config.mesh.smallest_world)
    prompts = load_prompts(config)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    groups = trial_groups(
        prompts.train.take(0, args.sample), prompts.tokenizer.encode, args.completion or ANSWER
    )
    functions = config.rl.reward.of_functions
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
    """Return the reward of a completion with its parts and their reasons."""
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
