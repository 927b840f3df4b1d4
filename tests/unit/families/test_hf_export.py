"""An exported config.json describes the same model, to us and to transformers."""

from typing import Any

import pytest
import torch
import transformers

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES, hf_config, weight_map
from tests.hf_models import CASES, oracle
from tests.tiny_models import TINY

MEGATRONS_OWN = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def architecture(model: ModelConfig) -> dict[str, Any]:
    """The arguments of Megatron's config that the logits depend on."""
    arguments = FAMILIES[model.family].architecture(model)
    return {name: value for name, value in arguments.items() if name not in MEGATRONS_OWN}


@pytest.mark.parametrize("case", [*CASES, *FAMILIES])
def test_a_written_config_is_read_as_the_same_model(case: str) -> None:
    model = oracle(case).ours if case in CASES else TINY[case]
    again = checked_model_from_hf(hf_config(model))
    assert architecture(again) == architecture(model)
    assert again.rope == model.rope
    assert again.norm_eps == model.norm_eps
    assert weight_map(again).hf_shapes == weight_map(model).hf_shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_makes_a_model_of_it_with_our_names_and_shapes(family: str) -> None:
    model = TINY[family]
    written = hf_config(model)
    config = transformers.AutoConfig.for_model(**written)
    with torch.device("meta"):
        theirs = getattr(transformers, written["architectures"][0])(config).state_dict()
    if model.tied_embeddings:
        del theirs["lm_head.weight"]
    assert {name: tuple(t.shape) for name, t in theirs.items()} == weight_map(model, "fused").hf_shapes


def test_heads_that_transformers_olmoe_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.num_heads=4 x model.head_dim=24"):
        hf_config(TINY["olmoe"].model_copy(update={"head_dim": 24}))
