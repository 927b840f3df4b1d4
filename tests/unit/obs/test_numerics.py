"""Which models the versions of NUMERICS train differently."""

import pytest

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.obs.attempts_file import depends_on_numerics
from tests.tiny_models import TINY

EVEN = {"vocab_multiple": 1}
PLAIN = TINY["qwen3_moe"].moe.model_copy(update={"balance": "none", "z_loss_coeff": 0.0})


@pytest.mark.parametrize(
    ("model", "depends"),
    [
        (TINY["llama"], True),
        (TINY["llama"].model_copy(update=EVEN), False),
        (TINY["qwen3_moe"].model_copy(update=EVEN), True),
        (TINY["qwen3_moe"].model_copy(update=EVEN | {"moe": PLAIN}), False),
        (
            TINY["qwen3_moe"].model_copy(
                update=EVEN | {"moe": PLAIN.model_copy(update={"capacity_factor": 1.0})}
            ),
            True,
        ),
    ],
    ids=["padded", "dense", "balanced", "no losses", "capacity"],
)
def test_padding_losses_of_routers_and_capacity_depend_on_it(model: ModelConfig, depends: bool) -> None:
    assert depends_on_numerics(model, "fp32", before=1) == depends
    assert not depends_on_numerics(model, "bf16", before=2)


@pytest.mark.parametrize(
    ("model", "precision", "before", "depends"),
    [
        ("deepseek_v3", "bf16", 2, True),
        ("deepseek_v3", "fp32", 2, False),
        ("qwen3_moe", "bf16", 2, False),
        ("deepseek_v3", "bf16", 3, False),
    ],
)
def test_the_expert_bias_of_a_bf16_model_depends_on_it(
    model: str, precision: str, before: int, depends: bool
) -> None:
    assert depends_on_numerics(TINY[model], precision, before) == depends


def test_since_version_4_reinforcement_learning_keeps_layers_of_multi_token_prediction():
    model = TINY["deepseek_v3"].model_copy(update={"mtp_layers": 1})
    assert depends_on_numerics(model, "fp32", before=3, trains_mtp=False)
    assert not depends_on_numerics(model, "fp32", before=4, trains_mtp=False)
    assert not depends_on_numerics(model, "fp32", before=3)
    assert not depends_on_numerics(TINY["deepseek_v3"], "fp32", before=3, trains_mtp=False)


@pytest.mark.parametrize(
    ("model", "before", "depends"), [("gpt_oss", 4, True), ("gpt_oss", 5, False), ("qwen2_moe", 4, False)]
)
def test_since_version_5_biases_of_experts_do_not_decay(model: str, before: int, depends: bool) -> None:
    assert depends_on_numerics(TINY[model], "fp32", before) == depends


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "step", "depends"),
    [
        ("constant", 4, 3, True),
        ("constant", 4, 4, False),
        ("wsd", 4, 4, False),
        ("cosine", 4, 4, True),
        ("linear", 1, 9, True),
        ("cosine", 0, 0, False),
    ],
)
def test_since_version_6_a_warm_up_begins_above_0(
    schedule: str, warmup_steps: int, step: int, depends: bool
) -> None:
    optim = OptimConfig(schedule=schedule, warmup_steps=warmup_steps)  # type: ignore[arg-type]
    model = TINY["qwen3_moe"].model_copy(update=EVEN)
    feels_warmup = optim.feels_warmup(step)
    assert depends_on_numerics(model, "fp32", before=5, feels_warmup=feels_warmup) == depends
    assert not depends_on_numerics(model, "fp32", before=6, feels_warmup=feels_warmup)
