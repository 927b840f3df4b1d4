"""Settings that mean something else on another mesh are named with what would make them equal."""

import pytest

from mcore_rl.checks.mesh import mesh_dependences
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.preferences import DPOConfig, RewardModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig, TrainConfig
from tests.tiny_models import TINY

MOE = TINY["qwen3_moe"].moe


@pytest.mark.parametrize(
    ("balance", "micro_batch", "tp", "wanted"),
    [
        ("global_aux_loss", 1, 1, ["4 data-parallel ranks", "1/8 of", "train.micro_batch=8"]),
        ("global_aux_loss", 2, 2, ["2 data-parallel ranks", "1/8 of", "train.micro_batch=16"]),
        ("global_aux_loss", 8, 1, []),
        ("seq_aux_loss", 1, 1, []),
        ("aux_loss", 1, 1, []),
    ],
)
def test_a_global_balance_loss_over_several_microbatches_is_named(
    balance: str, micro_batch: int, tp: int, wanted: list[str]
) -> None:
    config = PretrainConfig(
        model=TINY["qwen3_moe"].model_copy(update={"moe": MOE.model_copy(update={"balance": balance})}),
        mesh=MeshConfig(tp=tp, dp="auto"),
        train=TrainConfig(global_batch=32, micro_batch=micro_batch),
    )
    found = list(mesh_dependences(config, 4))
    assert len(found) == bool(wanted)
    assert all(text in found[0] for text in wanted)


def test_packing_decides_the_microbatches_of_reinforcement_learning() -> None:
    moe = MOE.model_copy(update={"balance": "global_aux_loss"})
    config = RlRunConfig(model=TINY["qwen3_moe"].model_copy(update={"moe": moe}))
    (sentence,) = mesh_dependences(config, 1)
    assert "packing" in sentence
    unused = moe.model_copy(update={"aux_loss_coeff": 0.0})
    config = RlRunConfig(model=TINY["qwen3_moe"].model_copy(update={"moe": unused}))
    assert not list(mesh_dependences(config, 1))


@pytest.mark.parametrize(
    ("config_class", "field"),
    [
        (RlRunConfig, "rl.update.max_tokens_per_microbatch"),
        (DPOConfig, "data.tokens_per_microbatch"),
        (RewardModelConfig, "data.tokens_per_microbatch"),
        (PretrainConfig, None),
    ],
)
def test_a_balance_of_microbatches_that_are_packed_by_tokens_is_named(
    config_class: type[RlRunConfig | DPOConfig | RewardModelConfig | PretrainConfig], field: str | None
) -> None:
    def found(**changed: object) -> list[str]:
        moe = MOE.model_copy(update={"balance": "aux_loss"} | changed)
        model = TINY["qwen3_moe"].model_copy(update={"moe": moe})
        return list(mesh_dependences(config_class(model=model), 1))

    assert [field in sentence for sentence in found()] == ([True] if field else [])
    assert [line.startswith("warning: ") for line in found(capacity_factor=1.25)] == ([False, True] if field else [])
    assert found(balance="seq_aux_loss") == []
    assert found(aux_loss_coeff=0.0) == []
