"""Completions and groups of texts for tests of rewards."""

from typing import Any

from mcore_rl.rl.types import Completion, Episode, Group, Problem, Prompt, single_version


def completion_of(text: str, tokens_T: tuple[int, ...], episode: Episode | None = None) -> Completion:
    """A completion that ended by itself, whose tokens were all certain and are of version 0."""
    return Completion(
        text=text,
        tokens_T=tokens_T,
        logprobs_T=(0.0,) * len(tokens_T),
        versions=single_version(0, len(tokens_T)),
        finish="stop",
        episode=episode,
    )


def text_group(answer: str, *texts: str, prompt: str = "?", **fields: Any) -> Group:
    """A prompt with this answer and these completions, of which every character is a token."""
    problem = Problem(problem_id=f"p-{answer}", prompt=prompt, answer=answer, fields=fields)
    completions = tuple(completion_of(text, (1,) * len(text)) for text in texts)
    return Group(prompt=Prompt(problem=problem, tokens_T=(1,)), completions=completions)
