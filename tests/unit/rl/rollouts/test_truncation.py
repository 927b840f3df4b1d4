"""The reason that is given when every completion of a batch is truncated."""

from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.rollouts.signal import truncation_reason
from mcore_rl.rl.types import Completion, Group, single_version
from tests.generating import prompt_of, spelled

SAMPLING = Sampling(max_new_tokens=4, stop_tokens=frozenset([0, 9]))


def group(*completions: tuple[int, ...]) -> Group:
    made = [
        Completion(text="", tokens_T=tokens, logprobs_T=(0.0,) * 4, versions=single_version(0, 4), finish="length")
        for tokens in completions
    ]
    return Group(prompt=prompt_of([1]), completions=tuple(made))


def test_a_special_token_that_most_hold_and_that_is_no_stop_is_named() -> None:
    groups = [group((5, 7, 5, 5), (7, 7, 8, 8)), group((7, 3, 3, 3), (4, 4, 8, 4))]
    warning = truncation_reason(groups, SAMPLING, frozenset([0, 7, 8, 9]), spelled)
    assert "rl.rollout.max_new_tokens=4 without an end" in warning
    assert "3 of 4 hold the special token '7 ' (7)" in warning and "rl.rollout.stop_tokens=[7]" in warning


def test_without_such_a_token_the_stops_are_named_that_the_model_does_not_know() -> None:
    for groups in ([group((5, 8, 5, 5), (4, 4, 4, 4), (4, 4, 4, 4))], []):
        warning = truncation_reason(groups, SAMPLING, frozenset([0, 7, 8, 9]), spelled)
        assert "was not trained to end with '0 ' (0), '9 ' (9)" in warning


def test_a_token_without_a_text_is_named_by_its_id() -> None:
    warning = truncation_reason([group((5, 8, 5, 5))], SAMPLING, frozenset([0, 9]), lambda tokens: "")
    assert "was not trained to end with token 0, token 9:" in warning
