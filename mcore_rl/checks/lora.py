"""Checks of the section `lora` against the rest of a config."""

from collections.abc import Iterator

from mcore_rl.config.lora import LoraConfig, present
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import CheckpointConfig, PlatformConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.families import family_of


def lora_violations(
    lora: LoraConfig,
    checkpoint: CheckpointConfig,
    model: ModelConfig,
    mesh: MeshConfig,
    platform: PlatformConfig,
    *,
    trains_mtp: bool,
) -> Iterator[str]:
    """Yield a sentence for each reason why a model cannot have low-rank adapters."""
    if checkpoint.weights == "adapters" and not (lora.is_on and checkpoint.load):
        lacks = "checkpoint.load names no base" if lora.is_on else 'lora.rank="none" has no adapters'
        yield f'checkpoint.weights="adapters", and {lacks}: the weights would be lost. Set it, or weights="all".'
    if not lora.is_on:
        yield from _without_rank(lora)
        return
    yield from _targets(lora, model)
    yield from layer_violations(lora, mesh, model, platform)
    if trains_mtp and model.mtp_layers:
        yield (
            f"lora.rank={lora.rank} with model.mtp_layers={model.mtp_layers}: layers of multi-token prediction "
            "get no adapters, and would no longer fit the layers before them. Set model.mtp_layers=0; "
            "`mcore-rl convert import --mtp drop` and `relayout` leave the layers out."
        )


def _without_rank(lora: LoraConfig) -> Iterator[str]:
    defaults = LoraConfig()
    for name in LoraConfig.model_fields:
        value = getattr(lora, name)
        if value != getattr(defaults, name):
            yield (
                f'lora.{name}={toml_value(value)} with lora.rank="none": no adapters are trained. Set lora.rank, such '
                f"as 16, or leave lora.{name} out."
            )


def _targets(lora: LoraConfig, model: ModelConfig) -> Iterator[str]:
    targets = lora.targets_in(model)
    if not targets:
        yield f'lora.targets=[] with lora.rank={lora.rank}: nothing would be trained. Name some, or set "auto".'
    there = present(model)
    for target in dict.fromkeys(targets):
        if target not in there:
            yield (
                f'lora.targets names "{target}", which this {model.family} model does not have: the adapters would '
                f"be of nothing. It has {', '.join(there)}."
            )
    if len(set(targets)) < len(targets):
        yield f"lora.targets={toml_value(list(targets))} names a kind of modules twice. Name each once."
    for name in ("expert_rank", "expert_gate_up"):
        value = getattr(lora, name)
        if "experts" not in targets and value != getattr(LoraConfig(), name):
            yield (
                f"lora.{name}={toml_value(value)} is not used: routed experts have no adapters here. Leave it out, or "
                'name "experts" in lora.targets.'
            )


def layer_violations(
    lora: LoraConfig, mesh: MeshConfig, model: ModelConfig, platform: PlatformConfig
) -> Iterator[str]:
    """Yield a sentence for each reason why these layers cannot have low-rank adapters."""
    targets = lora.targets_in(model)
    reasons = {
        'platform.layers="te": TransformerEngine has norms inside of its linear layers, and the adapters need their '
        'outputs. Set platform.layers="torch"': platform.layers == "te",
        f'platform.fp8="{platform.fp8}": products in 8 bits need TransformerEngine\'s layers, which get no adapters. '
        'Set platform.fp8="none"': platform.fp8 != "none",
        "platform.bf16_products=true: the adapters' products would not be rounded as those of the weights. Set it to "
        "false": platform.bf16_products,
        "platform.batch_invariant=true: the adapters' products are not held to it. Set it to "
        "false": platform.batch_invariant,
        f'model.family="{model.family}": there are no adapters of gated delta nets and gated attention. Leave '
        "lora.rank out": family_of(model).has_output_gate,
        f'model.family="{model.family}": adapters of attention over chosen keys have not been compared with any '
        "other. Leave lora.rank out": model.indexer.top_k is not None,
        'mesh.overlap_shared_experts=true and adapters in "shared_experts": Megatron takes the messages out of their '
        'linear layers. Set it to false, or leave "shared_experts" out of '
        "lora.targets": mesh.overlap_shared_experts and "shared_experts" in targets,
    }
    for reason, holds in reasons.items():
        if holds:
            yield f"lora.rank={lora.rank} with {reason}."
