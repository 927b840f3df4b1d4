"""Groups of texts for tests of rewards."""

from typing import Any

from mcore_rl.rl.types import Completion, Group, Problem, Prompt, single_version


def text_group(answer: str, *texts: str, prompt: str = "?", **fields: Any) -> Group:
    """A prompt with this answer and these completions, of which every character is a token."""
    problem = Problem(problem_id=f"p-{answer}", prompt=prompt, answer=answer, fields=fields)
    completions = tuple(
        Completion(
            text=text,
            tokens_T=(1,) * len(text),
            logprobs_T=(0.0,) * len(text),
            versions=single_version(0, len(text)),
            finish="stop",
        )
        for text in texts
    )
    return Group(prompt=Prompt(problem=problem, tokens_T=(1,)), completions=completions)
