"""Which models the versions of NUMERICS train differently."""

import pytest

from mcore_rl.config.model import ModelConfig
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
    assert depends_on_numerics(model) == depends
