"""Records of a rollout."""

import pytest
import torch

from mcore_rl.rl.types import Completion, VersionSpan, grown_routes, single_version


def completion(*versions: VersionSpan, length: int = 5, segments: tuple[int, ...] = ()) -> Completion:
    tokens_T, logprobs_T = (1,) * length, (0.0,) * length
    return Completion(
        text="", tokens_T=tokens_T, logprobs_T=logprobs_T, versions=versions, finish="stop", segments=segments
    )


def test_versions_rise_in_each_segment_alone_and_the_stale_tokens_lead_each() -> None:
    of_version = ((3, 0, 2), (7, 2, 3), (3, 3, 5), (5, 5, 6), (7, 6, 8))
    spans = tuple(VersionSpan(*span) for span in of_version)
    one = completion(*spans, length=8, segments=(3, 6))
    assert one.policy_version == 3 and one.stale_spans(7) == ((0, 2), (3, 6))
    assert one.stale_spans(5) == ((0, 2), (3, 5)) and one.stale_spans(3) == ()
    assert one.stale_spans(8) == ((0, 3), (3, 6), (6, 8))
    whole = completion(VersionSpan(3, 0, 8), length=8, segments=(0, 6))
    assert whole.stale_spans(4) == ((0, 6), (6, 8)), "a span of several segments"
    with pytest.raises(AssertionError):
        completion(*spans, length=8, segments=(6,))


def test_the_version_of_a_completion_is_that_of_its_first_token() -> None:
    assert completion(VersionSpan(3, 0, 2), VersionSpan(7, 2, 5)).policy_version == 3
    assert completion(*single_version(4, 5)).policy_version == 4
    assert completion(*single_version(4, 0), length=0).policy_version == 4


def test_routes_of_a_continued_completion_stay_those_of_its_logprobs() -> None:
    """Three tokens of prompt and two sampled: four rows; then three more sampled, with newer weights."""
    before_TLK, now_TLK = torch.zeros(4, 2, 1, dtype=torch.uint8), torch.ones(7, 2, 1, dtype=torch.int32)
    grown = grown_routes(before_TLK, now_TLK, 4)
    assert grown[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 1, 1] and grown.dtype == torch.uint8
    left_out = grown_routes(before_TLK, now_TLK, 6)
    assert left_out[:, 0, 0].tolist() == [0, 0, 0, 0, -1, -1, 1] and left_out.dtype.is_signed
    assert grown_routes(None, now_TLK, 5)[:, 0, 0].tolist() == [-1, -1, -1, -1, -1, 1, 1]


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
