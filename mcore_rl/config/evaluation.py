"""Conditions of an evaluation on held-out prompts, which two accuracies must share to be comparable."""

from collections.abc import Mapping
from typing import Any

from mcore_rl.config.extension import correct_part


def evaluation_conditions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of the evaluations of an RL config, given as the mapping of its sections.

    Returns:
        "prompts": the files, or task and sizes with the seed; "first": their number; "samples": completions per prompt;
        "temperature"; "max_new_tokens"; "correct_by": the part of the reward that decides which completions are
        correct; with an environment "environment": its name, arguments and limits.
    """
    rl = config.get("rl", {})
    prompts, evaluation = rl.get("prompts", {}), rl.get("eval", {})
    task = prompts.get("task", "file")
    if task == "file":
        source = ", ".join(evaluation.get("files", ()))
    else:
        sizes = f"{prompts.get('smallest')} to {prompts.get('largest')}"
        source = f"{task} {sizes}, seed {config.get('train', {}).get('seed')}"
    reward = rl.get("reward", {})
    correct = reward.get("correct", "auto")
    environment = rl.get("environment", {})
    limits = ("name", "arguments", "max_turns", "max_tokens")
    return {
        "prompts": source,
        "first": evaluation.get("num_prompts"),
        "samples": evaluation.get("samples"),
        "temperature": evaluation.get("temperature"),
        "max_new_tokens": rl.get("rollout", {}).get("max_new_tokens"),
        "correct_by": correct_part(None if correct == "none" else correct, reward.get("parts", ())),
        **({"environment": {key: environment[key] for key in limits}} if environment.get("name") else {}),
    }
