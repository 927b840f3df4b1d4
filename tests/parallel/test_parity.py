"""Three Adam steps are the same on every mesh as on one rank; a broken mesh is told apart."""

import functools
from typing import Any

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.train.state import TrainState
from tests.parallel.parity import (
    LENGTH,
    MESHES,
    ROWS,
    WIDE_ROWS,
    Outcome,
    Sabotage,
    Tensors,
    assert_equal_training,
    config_of,
    random_weights,
    run,
    training_steps,
)
from tests.ranks import run_ranks
from tests.tiny_models import TINY, shallow

MODELS = dict(TINY)
MODELS["deepseek_v3-mtp"] = MODELS["deepseek_v3"].model_copy(update={"mtp_layers": 1})
MODELS["deepseek_v32-mtp"] = MODELS["deepseek_v32"].model_copy(update={"mtp_layers": 1})
# Each of four chunks begins with a layer that has an indexer, and another shares its choice.
MODELS["glm_moe_dsa-8"] = MODELS["glm_moe_dsa"].model_copy(
    update={
        "num_layers": 8,
        "indexer": MODELS["glm_moe_dsa"].indexer.model_copy(update={"shared_layers": (1, 3, 5, 7)}),
    }
)
REPRESENTATIVE = ("tp2-ep2", "tp2-etp2", "pp2-vpp2", "cp2", "tp2-pp2-vpp2")
EVERY_AXIS = (
    *(
        "tp2",
        "pp2",
        "pp2-vpp2",
        "ep2",
        "tp2-ep2",
        "tp2-etp2",
        "tp2-etp2-ep2",
        "cp2",
        "cp2-ep2",
        "dp2",
        "dp2-overlapped",
    ),
    *("tp2-pp2", "tp2-pp2-vpp2", "pp2-ep2", "pp2-uneven", "pp2-layout", "pp2-vpp2-balanced", "tp2-dp2-overlapped"),
    *("pp2-vpp2-dp2-overlapped", "ep2-overlapped"),
)
CASES = [("qwen3_moe", mesh) for mesh in EVERY_AXIS] + [
    (model, mesh) for model in ("deepseek_v3", "mixtral") for mesh in REPRESENTATIVE
]
CASES += [
    (model, mesh) for model in ("qwen2_moe", "glm4_moe", "olmoe", "gpt_oss") for mesh in ("tp2-ep2", "pp2-vpp2", "cp2")
]
CASES += [
    (model, mesh)
    for model in ("deepseek_v2", "deepseek_v32", "dots1", "glm4_moe_lite", "minimax_m2", "solar_open")
    for mesh in ("tp2", "ep2", "pp2-vpp2", "cp2", "tp2-ep2")
]
CASES += [(model, mesh) for model in ("mistral", "seed_oss") for mesh in ("tp2", "pp2-vpp2", "cp2")]
CASES += [("deepseek_v32-mtp", mesh) for mesh in ("tp2", "cp2")]
CASES += [("glm_moe_dsa", mesh) for mesh in ("tp2", "ep2", "cp2", "tp2-ep2", "pp2", "tp2-pp2", "pp2-ep2")]
CASES += [("glm_moe_dsa-8", "pp2-vpp2")]
# Tensor and context parallelism change the order of sums, which gated delta nets amplify: see test_delta_nets.py.
CASES += [(model, mesh) for model in ("qwen3_next", "qwen3_5_moe_text") for mesh in ("ep2", "pp2-vpp2")]
CASES += [("qwen3_next", "pp2-ep2"), ("qwen3_5_text", "pp2"), ("qwen3_5_text", "pp2-vpp2")]
CASES += [(model, "tp2-ep2-shared-overlapped") for model in ("deepseek_v3", "qwen2_moe")]
CASES += [("qwen2", "tp2"), ("glm4_moe", "tp2-etp2")]
CASES += [("deepseek_v3-mtp", mesh) for mesh in ("tp2", "pp2-vpp2", "pp2-vpp2-balanced", "cp2")]
LOGITS_CHUNKS = {
    ("qwen3_moe", "tp2-ep2"): 7,
    ("deepseek_v3", "tp2-pp2-vpp2"): 11,
    ("qwen2", "tp2"): 5,
    ("deepseek_v3-mtp", "cp2"): 6,
    ("deepseek_v3-mtp", "tp2"): 9,
    ("qwen3_moe", "pp2-layout"): 13,
}
"""Positions that have logits at a time in some cells, which do not divide a micro-batch; on one rank all have them."""


@functools.cache
def single_rank(model: ModelConfig, length: int, rows: int) -> tuple[Tensors, Outcome]:
    """Initial weights of a model, and the three steps on one rank from them, in microbatches of so many sequences: a
    balance loss depends on them.
    """
    config = config_of(model, MeshConfig())
    initial = random_weights(config)
    return initial, run(config, 1, initial, length=length, rows=rows)


def assert_trains_as_one_rank(
    model: ModelConfig,
    mesh: MeshConfig,
    platform: PlatformConfig | None = None,
    sabotage: Sabotage | None = None,
    length: int = LENGTH,
    rows: int | None = None,
) -> None:
    """Run the three steps of a model on a mesh, and on one rank, and compare."""
    rows = rows or (ROWS if mesh.pp > 1 or mesh.dp != 1 else WIDE_ROWS)
    initial, reference = single_rank(model, length, rows)
    config = config_of(model, mesh, platform)
    assert_equal_training(run(config, mesh.smallest_world, initial, sabotage, length, rows), reference)


@pytest.mark.matrix("qwen3_moe-tp2-etp2-ep2", "qwen3_moe-pp2-vpp2-dp2-overlapped", "deepseek_v3-mtp-cp2")
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_three_steps_do_not_depend_on_the_mesh(model: str, mesh: str) -> None:
    platform = PlatformConfig(layers="torch", logits_chunk_tokens=LOGITS_CHUNKS.get((model, mesh), "auto"))
    assert_trains_as_one_rank(shallow(MODELS[model], MESHES[mesh]), MESHES[mesh], platform)


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_rank_whose_experts_get_no_token_takes_part_in_every_exchange(dispatcher: str) -> None:
    """The gradient of its gates, which are none, is exchanged too: the other ranks once got something else for it."""
    model = shallow(TINY["gpt_oss"])
    moe = model.moe.model_copy(update={"dispatcher": dispatcher})
    model = model.model_copy(update={"moe": moe})
    initial = random_weights(config_of(model, MeshConfig()))
    (bias_LE,) = (tensor for name, tensor in initial.items() if name.endswith("router.bias"))
    bias_LE[:, : model.moe.num_experts // 2] += 10.0  # the experts of rank 0
    reference = run(config_of(model, MeshConfig()), 1, initial)
    assert_equal_training(run(config_of(model, MESHES["ep2"]), 2, initial), reference)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2", "cp2", "pp2-vpp2"])
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_sequences_that_go_to_our_own_attention_do_not_depend_on_the_mesh(model: str, mesh: str) -> None:
    """On a CPU multiples of 64 positions do; with one row and one group of heads a rank it once changed its input."""
    assert_trains_as_one_rank(MODELS[model], MESHES[mesh], length=128, rows=1)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1", "pp2-vpp2", "tp2-ep2"])
@pytest.mark.parametrize("recompute", ["full", "core_attn", "moe", "moe_act-layernorm"])
def test_recomputing_activations_changes_nothing(recompute: str, mesh: str) -> None:
    platform = (
        PlatformConfig(layers="torch", recompute="full")
        if recompute == "full"
        else PlatformConfig(layers="torch", recompute="selective", recompute_modules=tuple(recompute.split("-")))  # type: ignore[arg-type]
    )
    on = MESHES[mesh]
    assert_trains_as_one_rank(shallow(MODELS["qwen3_moe"], on), on, platform)


def trained_in_turn(configs: list[PretrainConfig]) -> list[dict[str, Any]]:
    """On a rank: the three steps of each config, from the same random weights."""
    outcomes = []
    for config in configs:
        outcomes.append(training_steps(config, None, None, LENGTH))
        destroy_mesh()
    return outcomes


@pytest.mark.full
def test_megatrons_fused_cross_entropy_trains_a_bf16_model_as_the_plain_one_does() -> None:
    """Both give the logits, which are bf16, a gradient that is rounded to bf16 once."""
    plain, fused = (
        config_of(
            MODELS["qwen3_moe"],
            MESHES["tp2"],
            PlatformConfig(layers="torch", precision="bf16", cross_entropy_fusion=fusion),
        )
        for fusion in ("none", "native")
    )
    by_plain, by_fused = run_ranks(trained_in_turn, 2, [plain, fused])[0]
    assert by_fused["losses"] == pytest.approx(by_plain["losses"], rel=1e-6)
    assert by_fused["grad_norms"] == pytest.approx(by_plain["grad_norms"], rel=1e-6)


def unmark_norms(state: TrainState) -> None:
    """The bug of a norm that does not say that its gradient is partial under sequence parallelism."""
    for chunk in state.chunks:
        for name, param in chunk.named_parameters():
            if "norm" in name:
                param.sequence_parallel = False


def halve_gradients(state: TrainState) -> None:
    """The bug of dividing by the ranks twice."""
    for chunk in state.chunks:
        for param in chunk.parameters():
            param.register_hook(lambda gradient: gradient / 2)


@pytest.mark.matrix("unmark_norms")
@pytest.mark.parametrize("sabotage", [unmark_norms, halve_gradients])
def test_a_broken_reduction_fails_the_comparison(sabotage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_trains_as_one_rank(shallow(MODELS["qwen3_moe"]), MESHES["tp2"], sabotage=sabotage)
