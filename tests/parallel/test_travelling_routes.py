"""Routes from other ranks, another layout or another mesh train as on one rank."""

import pytest

from mcore_rl.config.mesh import MeshConfig
from tests.parallel import replay_oracle, travelling
from tests.parallel.replay_outcomes import MODELS, assert_same_training, one_rank, together
from tests.ranks import run_ranks

WORLD = 4
MESHES = {
    "tp2-dp2": MeshConfig(tp=2, dp=2),
    "cp2-dp2": MeshConfig(cp=2, dp=2),
    "pp2-dp2": MeshConfig(pp=2, dp=2),
    "tp2-pp2-vpp2": MeshConfig(tp=2, pp=2, vpp=2),
    "pp2-layout-dp2": MeshConfig(pp=2, dp=2, pp_layout=(4, 0)),
}


def test_rollouts_of_other_replicas_train_as_on_one_rank() -> None:
    """R3 sends a rank only its positions and layers, a byte for each expert; nothing is broadcast.

    Tokens that the engine left out are routed live and all others are imposed, as an oracle does without the tape.
    """
    alone = one_rank("qwen3_moe")
    reference = alone.outcomes["packed"]
    ranks = run_ranks(
        travelling.trained_on_rollouts,
        WORLD,
        list(MESHES.values()),
        MODELS["qwen3_moe"],
        alone.weights,
        reference.recorded,
    )
    samples = range(len(travelling.LENGTHS))
    names = {n: {n * travelling.IDS + t for t in travelling.positions_left_out(n)} for n in samples}
    left_out = frozenset[int]().union(*names.values())
    model, weights = MODELS["qwen3_moe"], alone.weights
    ((by_hand,),) = run_ranks(replay_oracle.replayed_by_hand, 1, model, weights, ("packed",), left_out)
    oracle = together([by_hand | {"metrics": {}, "error": "", "accounts": []}])
    assert oracle.losses != pytest.approx(reference.losses, rel=1e-5)
    num_repeated, num_compared = repeated_by_hand(reference.recorded, MODELS["qwen3_moe"].vocab_size)
    assert num_repeated >= 5
    for index, mesh in enumerate(MESHES.values()):
        found = [rank[index] for rank in ranks]
        assert_same_training(together(found), reference)
        with_gaps = together([rank["left_out"] for rank in found])
        assert with_gaps.errors == [""] * WORLD
        assert_same_training(with_gaps, oracle)
        assert with_gaps.metrics["routes/live_fraction"] == (len(left_out), sum(travelling.LENGTHS))
        assert with_gaps.metrics["routes/compared_tokens"][0] == sum(travelling.LENGTHS) - len(left_out)
        for rank_outcome in found:
            assert rank_outcome["repeated"] == pytest.approx(num_repeated / num_compared, abs=1e-12)
            expected, sent = rank_outcome["moved"]
            assert sent == expected and (sent > 0 or mesh.dp == 1), (sent, expected)
            assert rank_outcome["cached_bytes"][0] == rank_outcome["cached_bytes"][1]
            assert rank_outcome["other_traffic"] == {}


def repeated_by_hand(recorded: travelling.Recorded, vocab_size: int) -> tuple[int, int]:
    """Return the number of tokens with the routes, in all layers, of the token before and another id, and the number of
    tokens with another id than the one before.
    """
    num_repeated = num_compared = 0
    for sample in range(len(travelling.LENGTHS)):
        routes = travelling.with_rows_repeated(sample, travelling.as_rollout(sample, recorded, vocab_size))
        ids, experts = routes.tokens_T.tolist(), routes.experts_TLK.tolist()
        new = [n for n in range(1, len(ids)) if ids[n] != ids[n - 1]]
        num_repeated += sum(experts[n] == experts[n - 1] for n in new)
        num_compared += len(new)
    return num_repeated, num_compared


def test_routes_replay_in_other_rows_and_under_other_meshes() -> None:
    alone = one_rank("qwen3_moe")
    reference = alone.outcomes["packed"]
    ranks = run_ranks(
        travelling.laid_out_otherwise,
        WORLD,
        list(MESHES.values()),
        MODELS["qwen3_moe"],
        alone.weights,
    )
    for index in range(len(MESHES)):
        found = [rank[index] for rank in ranks]
        for replay in range(1 + bool(index)):
            assert_same_training(together([rank["outcome"][replay] for rank in found]), reference)
        messages = {rank["error"] for rank in found}
        assert len(messages) == 1
        assert "this rank has other positions of it" in min(messages) or "there are no routes" in min(
            messages
        )


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(travelling.damaged_on_one_rank, 2, MODELS["qwen3_moe"])
    assert first == second
    flipped, missing = first
    assert "rank 1: layers [1], sample 6 of version 3: the experts that the routers used are not" in flipped
    assert "rank 1: sample 7 of version 3, layers [0, 1, 2, 3]: there are no routes" in missing


@pytest.mark.matrix("deepseek_v3", "qwen3_moe")
@pytest.mark.parametrize(
    "model",
    [
        *("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_next"),
        *("deepseek_v2-shallow", "deepseek_v32-shallow", "dots1-shallow", "glm4_moe_lite-shallow"),
        *("minimax_m2-shallow", "qwen3_5_moe_text-shallow", "solar_open-shallow"),
    ],
)
def test_the_native_engines_routes_are_the_training_passes(model: str) -> None:
    """With equal weights R3 changes next to nothing, whichever replica generated."""
    names = ["tp2-dp2", "cp2-dp2", *(() if model.endswith("shallow") else ("pp2-dp2",))]
    meshes = [MESHES[name] for name in names]
    work = (meshes, MODELS[model], one_rank(model).weights)
    ranks = run_ranks(travelling.trained_on_the_engines, WORLD, *work)
    for metrics in (metrics for rank in ranks for metrics in rank):
        assert metrics["rollout_routes/compared_tokens"] == sum(min(n, 15) for n in travelling.LENGTHS)
        assert metrics["rollout_routes/changed_fraction"] <= 2
