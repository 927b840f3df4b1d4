"""A step's groups do not depend on how many replicas make them; dynamic sampling takes what has a signal."""

import functools
import statistics
from typing import Any

import pytest

from mcore_rl.config.mesh import MeshConfig
from tests.parallel.rollouts import PAUSE_S, PROMPTS, SIZE, taken, taken_from_flow, waited_s
from tests.ranks import run_ranks

STEPS = [0, 3, 8]


@functools.cache
def alone(dynamic: bool) -> list[dict[str, Any]]:
    """One replica's groups of each step."""
    (rank,) = run_ranks(taken, 1, MeshConfig(), STEPS, {"dynamic_sampling": dynamic})
    return rank


@pytest.mark.matrix("dynamic-dp2", "static-tp2", "dynamic-pp2-dp2")
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(dp=2), MeshConfig(tp=2), MeshConfig(cp=2), MeshConfig(pp=2, dp=2)],
    ids=["dp2", "tp2", "cp2", "pp2-dp2"],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_groups_are_those_of_one_replica(mesh: MeshConfig, dynamic: bool) -> None:
    ranks = run_ranks(taken, mesh.smallest_world, mesh, STEPS, {"dynamic_sampling": dynamic})
    for step, wanted in enumerate(alone(dynamic)):
        for found in (rank[step] for rank in ranks):
            for known_to_all in ("rewards", "shapes", "taken", "signal"):
                assert found[known_to_all] == wanted[known_to_all], known_to_all
            assert found["metrics"] == pytest.approx(wanted["metrics"])
        for share in ("prompts", "lengths"):
            whole = {number: x for rank in ranks for number, x in rank[step][share].items()}
            assert whole == wanted[share]


def test_dynamic_sampling_takes_the_first_groups_with_a_signal_and_says_what_it_left() -> None:
    ((plain,),) = run_ranks(taken, 1, MeshConfig(), [0], {})
    assert plain["taken"] == PROMPTS
    assert list(plain["prompts"].values()) == [f"reversing/1/{n}" for n in range(4)]
    assert plain["rewards"][0] == plain["rewards"][3] == [-0.5] * SIZE
    assert plain["metrics"]["reward/groups_without_signal_fraction"] == 0.5
    assert (plain["signal"].num_groups, plain["signal"].num_without_signal) == (4, 2)
    spreads = [statistics.pstdev(rewards) for rewards in plain["rewards"]]
    assert plain["metrics"]["reward/group_std"] == pytest.approx(statistics.mean(spreads))

    ((dynamic,),) = run_ranks(taken, 1, MeshConfig(), [0], {"dynamic_sampling": True})
    assert list(dynamic["prompts"].values()) == [f"reversing/1/{n}" for n in (1, 2, 4, 5)]
    # Two of four had a signal: two more are likely among four, and 6 and 7, of which there are too many, come again.
    assert dynamic["taken"] == 6
    assert all(len(set(rewards)) > 1 for rewards in dynamic["rewards"])
    assert dynamic["metrics"]["rollout/refills"] == 1
    assert dynamic["metrics"]["rollout/unused_groups"] == 4
    assert dynamic["metrics"]["reward/groups_without_signal_fraction"] == 0
    # Groups that are left out for want of a signal are counted among all that were generated: prompts 0 to 7.
    ((*batches,),) = run_ranks(taken, 1, MeshConfig(), [0, PROMPTS], {})
    num_equal = sum(len(set(rewards)) == 1 for batch in batches for rewards in batch["rewards"])
    assert (dynamic["signal"].num_groups, dynamic["signal"].num_without_signal) == (8, num_equal)

    ((few,),) = run_ranks(taken, 1, MeshConfig(), [0], {"dynamic_sampling": True, "max_refills": 1})
    assert few["taken"] == 6


def test_the_time_of_a_batch_has_its_refills() -> None:
    """There is one, as above; the mean is over the two replicas."""
    mesh = MeshConfig(dp=2)
    plain, refilled = (
        run_ranks(waited_s, 2, mesh, {"dynamic_sampling": dynamic})[0] for dynamic in (False, True)
    )
    assert plain >= PAUSE_S
    assert refilled >= 2 * PAUSE_S


def test_dynamic_sampling_by_accuracy_replaces_groups_that_differ_in_their_length_alone() -> None:
    """DAPO asks for right and wrong answers; by the reward, four right ones of other lengths are trained on."""
    by = {"dynamic_sampling": True, "max_refills": 4}
    ((reward,),) = run_ranks(taken, 1, MeshConfig(), [0], by | {"dynamic_sampling_by": "reward"})
    ((accuracy,),) = run_ranks(taken, 1, MeshConfig(), [0], by | {"dynamic_sampling_by": "accuracy"})
    # An answer of at most two tokens has the reward 1 and is correct here.
    assert list(reward["prompts"].values()) == [f"reversing/1/{n}" for n in (1, 2, 4, 5)]
    for rewards in accuracy["rewards"]:
        assert 0 < sum(one >= 1 for one in rewards) < SIZE
    kept = set(accuracy["prompts"].values())
    assert any({one >= 1 for one in rewards} == {False} for rewards in reward["rewards"])
    assert not kept & {
        f"reversing/1/{n}"
        for n, rewards in zip((1, 2, 4, 5), reward["rewards"], strict=True)
        if not any(one >= 1 for one in rewards)
    }


@pytest.mark.parametrize("mesh", [MeshConfig(dp=2), MeshConfig(tp=2, pp=2)], ids=["dp2", "tp2-pp2"])
def test_a_flow_gives_the_groups_of_turns_and_ends_all_ranks_where_one_replica_fails(
    mesh: MeshConfig,
) -> None:
    """The prompt 13 is of the second of two replicas, and of the fourth rollout batch; it starts with the third."""
    (wanted,) = run_ranks(taken, 1, MeshConfig(), [0, PROMPTS, 2 * PROMPTS], {})
    ranks = run_ranks(taken_from_flow, mesh.smallest_world, mesh, 1, 13)
    for batches, error in ranks:
        assert error == ("rank 1: " if mesh.dp == 2 else "rank 0: ") + "no server answers for prompt 13"
        assert 2 <= len(batches) == len(ranks[0][0]) <= 3
        for step, batch in enumerate(batches):
            for known_to_all in ("rewards", "shapes", "taken", "signal"):
                assert batch[known_to_all] == wanted[step][known_to_all], known_to_all
            started = batch["metrics"]["rollout/started_prompts"]
            assert (step + 1) * PROMPTS <= started <= (step + 2) * PROMPTS
            assert batch["metrics"]["rollout/staleness_max"] <= 1
    for share in ("prompts", "lengths"):
        for step in range(len(ranks[0][0])):
            whole = {number: x for batches, _ in ranks for number, x in batches[step][share].items()}
            assert whole == wanted[step][share]
