"""Records of a rollout."""

import pytest

from mcore_rl.rl.types import Completion, VersionSpan, single_version


def completion(*versions: VersionSpan, length: int = 5) -> Completion:
    return Completion(
        text="", tokens_T=(1,) * length, logprobs_T=(0.0,) * length, versions=versions, finish="stop"
    )


def test_the_version_of_a_completion_is_that_of_its_first_token() -> None:
    assert completion(VersionSpan(3, 0, 2), VersionSpan(7, 2, 5)).policy_version == 3
    assert completion(*single_version(4, 5)).policy_version == 4
    assert completion(*single_version(4, 0), length=0).policy_version == 4


@pytest.mark.parametrize(
    "versions",
    [
        (),
        (VersionSpan(3, 0, 4),),
        (VersionSpan(3, 1, 5),),
        (VersionSpan(3, 0, 2), VersionSpan(4, 3, 5)),
        (VersionSpan(4, 0, 2), VersionSpan(3, 2, 5)),
    ],
    ids=["none", "too short", "begins late", "a gap", "a falling version"],
)
def test_spans_that_do_not_cover_the_tokens_in_order_are_refused(versions: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(AssertionError):
        completion(*versions)
