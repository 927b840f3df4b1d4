"""A key that config.json does not have is refused, or has the default that transformers' class of the model has."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import ConfigError
from tests.hf_models import CASES, oracle
from tests.unit.convert.test_shells import CLASSES, whole
from tests.unit.families.test_hf_config import as_transformers_4

READ_INSIDE = ("rope_parameters", "rope_scaling", "text_config")


def as_transformers_reads(config: dict[str, Any]) -> dict[str, Any]:
    """The config with all defaults of transformers' class."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    return kind.from_dict(copy.deepcopy(config)).to_dict()  # type: ignore[no-any-return]


def without_one_key(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each key, and the config without it."""
    for key, value in config.items():
        if key == "model_type":
            continue
        yield key, {name: other for name, other in config.items() if name != key}
        if key in READ_INSIDE and isinstance(value, dict):
            for name, inner in without_one_key(value):
                yield f"{key}.{name}", config | {key: inner}


def read(config: dict[str, Any]) -> ModelConfig | None:
    """Our config without MTP layers, which transformers' models do not have; None if it is refused."""
    try:
        return checked_model_from_hf(config).model_copy(update={"mtp_layers": 0})
    except ConfigError:
        return None


@pytest.mark.matrix(
    "llama",
    "qwen3-yarn",
    "mixtral",
    "deepseek_v3-yarn",
    "qwen2_moe-no-biases",
    "olmoe-normalized",
    "deepseek_v3-three-a-group",
    "glm4_moe-plain",
    "deepseek_v32-yarn",
    "dots1",
    "minimax_m2",
    "qwen3_5_moe_text",
)
@pytest.mark.parametrize("case", [*CASES, *CLASSES])
def test_an_absent_key_has_transformers_default_or_is_refused(case: str) -> None:
    config = (oracle(case) if case in CASES else whole(case)).config
    compared = 0
    for form in (config, as_transformers_4(config)) if case in CASES else (config,):
        for key, changed in without_one_key(form):
            ours = read(changed)
            if ours is not None:
                compared += 1
                assert ours == read(as_transformers_reads(changed)), key
    assert compared > 10


ZERO = ("routed_scaling_factor", "n_group", "topk_group", "num_key_value_heads", "q_lora_rank", "rope_theta")


@pytest.mark.parametrize("key", ZERO)
def test_zero_is_not_taken_for_an_absent_value(key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}=0"):
        checked_model_from_hf(oracle("deepseek_v3").config | {key: 0})
