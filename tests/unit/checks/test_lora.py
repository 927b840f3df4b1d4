"""Each rule of low-rank adapters, by a config that breaks it alone."""

from pathlib import Path

import pytest

from mcore_rl.checks.preferences import check_dpo
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.checks.run import check
from mcore_rl.checks.sft import check_sft
from mcore_rl.config.load import load_config
from mcore_rl.config.preferences import DPOConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError

SOUND = (
    "data.train=[text] train.eval_batches=none lora.rank=16 platform.layers=torch model.moe.num_experts=8 "
    "model.moe.ffn_hidden_size=64"
)
SHARED = "model.family=qwen2_moe model.moe.shared_experts=1"


def violations(overrides: str) -> list[str]:
    config = load_config(PretrainConfig, None, f"{SOUND} {overrides}".split())
    try:
        check(config, config.mesh.smallest_world)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        'lora.targets=["attention","experts"] lora.expert_rank=2 lora.expert_gate_up=split',
        "platform.precision=bf16",
        f'{SHARED} mesh.ep=2 mesh.dp=2 mesh.overlap_shared_experts=true lora.targets=["attention","experts"]',
    ],
)
def test_a_sound_config_passes(overrides: str) -> None:
    assert violations(overrides) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "lora.rank=none lora.alpha=16",
            'lora.alpha=16.0 with lora.rank="none": no adapters are trained. Set lora.rank',
        ),
        ("lora.targets=[]", "nothing would be trained"),
        ("checkpoint.weights=adapters", 'adapters", and checkpoint.load names no base'),
        ("checkpoint.weights=adapters lora.rank=none", 'adapters", and lora.rank="none" has no adapters'),
        ('lora.targets=["attention","mlp"]', 'names "mlp", which this qwen3_moe model does not have'),
        ('lora.targets=["shared_experts"]', "It has attention, experts."),
        ('lora.targets=["attention","attention"]', "names a kind of modules twice"),
        ('lora.targets=["attention"] lora.expert_rank=2', "lora.expert_rank=2 is not used"),
        ('lora.targets=["attention"] lora.expert_gate_up=split', 'lora.expert_gate_up="split" is not used'),
        ("platform.layers=te", "TransformerEngine has norms inside of its linear layers"),
        ("platform.layers=cpu platform.bf16_products=true", "would not be rounded as those of the weights"),
        ("platform.batch_invariant=true", "the adapters' products are not held to it"),
        (
            f"{SHARED} mesh.ep=2 mesh.dp=2 mesh.overlap_shared_experts=true",
            "takes the messages out of their linear layers",
        ),
        ("model.family=glm4_moe model.mtp_layers=1", "layers of multi-token prediction get no adapters"),
    ],
)
def test_a_broken_rule_is_named(overrides: str, expected: str) -> None:
    (violation,) = violations(overrides)
    assert expected in violation


@pytest.mark.parametrize("kind", PROGRAMS)
def test_layers_of_transformer_engine_are_refused_by_every_program_before_it_begins(kind: str) -> None:
    program = PROGRAMS[kind]
    overrides = ["lora.rank=4", "platform.layers=te"]
    config = load_config(program.config, None, overrides)
    with pytest.raises(ConfigError, match=r'"te": TransformerEngine has norms .* Set platform\.layers="torch"'):
        program.check(config, config.mesh.smallest_world)
    assert not load_config(program.config, None, overrides[:1]).allows_te


def test_adapters_in_8_bits_are_refused() -> None:
    assert any("products in 8 bits need" in line for line in violations("platform.layers=auto platform.fp8=hybrid"))


def test_another_kind_of_layers_is_chosen_only_where_it_has_adapters() -> None:
    assert load_config(SFTConfig, None).allows_te


def test_preferences_refuse_adapters_that_their_reference_would_lack() -> None:
    config = load_config(DPOConfig, Path("tiny_moe/dpo"), ["lora.rank=4", "lora.load=folder"])
    with pytest.raises(ConfigError, match="with `mcore-rl dpo`: the reference"):
        check_dpo(config, config.mesh.smallest_world)


def test_fine_tuning_has_the_section_too() -> None:
    config = load_config(SFTConfig, None, ["lora.rank=4", 'lora.targets=["experts"]', "model.family=llama"])
    with pytest.raises(ConfigError, match='names "experts", which this llama model does not have'):
        check_sft(config, 1)


RL = "rl.engine.kind=native model.moe.balance=none platform.layers=torch lora.rank=8"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "model.moe.balance=aux_loss",
            "lora.rank=8 with model.moe.aux_loss_coeff=0.01: a loss on routers that do not learn",
        )
    ],
)
def test_reinforcement_learning_refuses_what_adapters_would_make_wrong(overrides: str, expected: str) -> None:
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), RL.split())
    check_rl(config, config.mesh.smallest_world)
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), f"{RL} {overrides}".split())
    with pytest.raises(ConfigError) as error:
        check_rl(config, config.mesh.smallest_world)
    assert expected in str(error.value)
