"""Checks that a model's settings are compatible with each other and with its family, on any mesh."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, isqrt
from operator import attrgetter
from typing import Any

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, present
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.run import PlatformConfig, RunConfig
from mcore_rl.config.section import Section
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.families import all_families, family_of, hf_config, model_from_hf
from mcore_rl.families.config_json import LLAMA3_CONSTANTS, HfConfig
from mcore_rl.families.family import OPTIONAL_SETTINGS, Family
from mcore_rl.families.same_model import model_changes
from mcore_rl.families.weight_map import listed

MAX_DIVISOR = 10_000
"""Largest divisor to try for a message, so that a misspelt width of 10^18 is refused at once too."""


def checked_model_from_hf(config: HfConfig, family: str | None = None) -> ModelConfig:
    """Return the model that a config.json describes; ConfigError if Megatron cannot represent or run it."""
    model = model_from_hf(config, family)
    if violations := list(model_violations(model)):
        raise ConfigError("config.json describes a model that Megatron cannot run:\n" + "\n".join(violations))
    return model


def checked_hf_config(model: ModelConfig) -> dict[str, Any]:
    """Return a config.json as `hf_config` does. Raises ConfigError unless it is read back as the same model."""
    written = hf_config(model)
    try:
        changes = model_changes(model.model_dump(mode="json"), model_from_hf(written, model.family))
        # In transformers' models, biases of the choice of experts are zero where a folder has none.
        faults = [str(change) for change in changes if change.key != "model.moe.expert_bias"]
    except ConfigError as error:
        faults = [str(error)]
    if faults:
        raise ConfigError(
            f"transformers' {written['architectures'][0]} cannot be this model, which can neither be exported nor "
            f"served: its config.json would be another model's.\n{listed(faults)}"
        )
    return written


def model_violations(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence, with a remedy, for each disagreement; ConfigError for an unknown family."""
    family = family_of(model)
    if model.head == "score" and model.mtp_layers:
        yield (
            f'model.mtp_layers={model.mtp_layers} with model.head="score": MTP layers predict tokens, which a score is '
            "not. Set model.mtp_layers=0."
        )
    yield from _experts(model, family)
    yield from _optional_settings(model, family)
    yield from _shape(model, family)
    yield from _rope(model, family)
    if model.is_moe:
        yield from _router(model, family)
        yield from _groups(model, family)
    yield from family.violations(model)


def divisors(number: int) -> str:
    """Return the divisors of `number` for a message, as in "1, 2, 4, 8"; only the first ones of many."""
    limit = min(isqrt(number), MAX_DIVISOR)
    small = [i for i in range(1, limit + 1) if number % i == 0]
    if limit < isqrt(number):
        return ", ".join(map(str, [*small[:8], "...", number]))
    found = sorted({*small, *(number // i for i in small)})
    return ", ".join(map(str, found if len(found) <= 10 else [*found[:8], "...", found[-1]]))


def unused(key: str, section: Section, *rules: tuple[bool, str, str]) -> Iterator[str]:
    """Yield a sentence for each rule (holds, "fields" or "" for all, reason) by which nothing reads set fields."""
    for holds, names, cause in rules:
        infos = {name: type(section).model_fields[name] for name in names.split() or type(section).model_fields}
        defaults = {name: _plain(info.get_default(call_default_factory=True)) for name, info in infos.items()}
        changed = [name for name in defaults if holds and _plain(getattr(section, name)) != defaults[name]]
        shown = [toml_value(_plain(getattr(section, name))) for name in changed]
        named = ", ".join(f"{key}.{name}={value}" for name, value in zip(changed, shown, strict=True))
        if len(changed) == 1:
            yield f"{named} is not used with {cause}. Leave it at {toml_value(defaults[changed[0]])}, or change that."
        elif changed:
            yield f"{named} are not used with {cause}. Leave them out, or change that."


def _plain(value: Any) -> Any:
    """Return a section as a table, and any other value as it is."""
    return value.model_dump() if isinstance(value, Section) else value


def _experts(model: ModelConfig, family: Family) -> Iterator[str]:
    num_experts, is_dense = model.moe.num_experts, family.router == "none"
    if is_dense != bool(num_experts):
        return
    others = ", ".join(name for name, other in all_families().items() if (other.router == "none") != is_dense)
    if not is_dense:
        yield (
            f'model.family="{model.family}" is a Mixture of Experts, but model.moe.num_experts=0. Set it, or '
            f"use one of the dense families {others}."
        )
    else:
        yield (
            f'model.moe.num_experts={num_experts}, but model.family="{model.family}" is dense. Set it to 0, or '
            f"use one of the families {others}."
        )


def _optional_settings(model: ModelConfig, family: Family) -> Iterator[str]:
    for name in OPTIONAL_SETTINGS:
        value, default = attrgetter(name)(model), attrgetter(name)(ModelConfig())
        in_use = model.is_moe or not name.startswith("moe.")
        if in_use and value != default and name not in family.settings:
            known = ", ".join(o.model_type for o in all_families().values() if name in o.settings)
            yield (
                f'model.{name}={toml_value(value)} is supported by {known} only, not by model.family="{model.family}". '
                f"Set it to {toml_value(default)}."
            )
    for name, chosen, choices in (
        ("qkv_bias", model.qkv_bias, family.qkv_bias),
        ("qk_norm", model.qk_norm, family.qk_norm),
    ):
        if chosen not in ("auto", *choices):
            yield (
                f'model.{name}="{chosen}", but model.family="{model.family}" '
                f"{'never' if chosen == 'on' else 'always'} has them. Leave it out."
            )


def _shape(model: ModelConfig, family: Family) -> Iterator[str]:
    if family.is_latent:
        if model.mla.qk_rope_head_dim % 2:
            yield (
                f"model.mla.qk_rope_head_dim={model.mla.qk_rope_head_dim} is odd: it is turned pairwise. Make it even."
            )
        return
    turned = int(model.head_dim * model.rope.fraction)
    if turned % 2 or not turned:
        part = f" x model.rope.fraction={model.rope.fraction}" if model.rope.fraction != 1 else ""
        yield (
            f"model.head_dim={model.head_dim}{part} is {'odd' if turned % 2 else 'nothing'}: rotary position "
            "turns it pairwise. Make it even."
        )
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not a multiple of "
            f"model.num_kv_heads={model.num_kv_heads}: each key/value head serves as many query heads. Set "
            f"model.num_kv_heads to one of {divisors(model.num_heads)}."
        )


def _rope(model: ModelConfig, family: Family) -> Iterator[str]:
    rope, llama3_length = model.rope, LLAMA3_CONSTANTS["original_max_position_embeddings"]
    yield from unused("model.rope", rope, (rope.scaling == "none", "factor", 'model.rope.scaling="none"'))
    if rope.scaling != "none" and rope.factor < 1.0:
        yield f"model.rope.factor={rope.factor} would shrink the wavelengths. Set it to 1 or above."
    if not rope.truncate and (rope.scaling != "yarn" or family.is_latent):
        yield (
            "model.rope.truncate=false is supported by YaRN in grouped-query attention only. Set it to true, or use "
            'another model.family or model.rope.scaling="yarn".'
        )
    if rope.scaling == "llama3" and family.is_latent:
        yield (f'model.rope.scaling="llama3" is not supported by {model.family}\'s attention. Use "yarn" or "none".')
    elif rope.scaling == "llama3" and rope.original_length != llama3_length:
        yield (
            f'model.rope.original_length={rope.original_length} with model.rope.scaling="llama3": Megatron '
            f"has {llama3_length} built in. Set it to that."
        )


def _router(model: ModelConfig, family: Family) -> Iterator[str]:
    moe = model.moe
    if not moe.ffn_hidden_size:
        yield "model.moe.ffn_hidden_size=0: an expert has no width. Set it."
    if moe.top_k > moe.num_experts:
        yield (
            f"model.moe.top_k={moe.top_k} is more than model.moe.num_experts={moe.num_experts}: a token "
            "cannot go to more experts than there are. Lower it."
        )
    if moe.capacity_factor is not None and moe.capacity_factor > moe.num_experts:
        yield (
            f"model.moe.capacity_factor={moe.capacity_factor} is more than model.moe.num_experts={moe.num_experts}: an "
            'expert would take more tokens than there are. Lower it, or set "none", with which no token is dropped.'
        )
    if moe.first_dense_layers >= model.num_layers:
        yield (
            f"model.moe.first_dense_layers={moe.first_dense_layers} leaves none of model.num_layers="
            f"{model.num_layers} to the experts. Lower it, or use a dense family."
        )
    if moe.top_k == 1 and moe.normalize_top_k:
        yield (
            "model.moe.top_k=1 with model.moe.normalize_top_k=true: the one gate would be 1 whatever the "
            "router says, and it would not learn. Set model.moe.normalize_top_k=false."
        )
    if family.router == "sigmoid" and moe.top_k > 1 and not moe.normalize_top_k:
        yield (
            f"model.moe.normalize_top_k=false with model.moe.top_k={moe.top_k}: the gates of {model.family}'s "
            "sigmoid router always sum to one (times model.moe.routed_scaling). Set it to true."
        )


def _groups(model: ModelConfig, family: Family) -> Iterator[str]:
    moe = model.moe
    groups, chosen = moe.num_groups, moe.top_groups
    settings = f"model.moe.num_groups={toml_value(groups)} and model.moe.top_groups={toml_value(chosen)}"
    if groups is None or chosen is None:
        if groups or chosen:
            yield f'{settings}: group-limited routing needs both. Set the other, or both to "none".'
        return
    if moe.num_experts % groups:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not a multiple of model.moe.num_groups={groups}: "
            f"groups are equally large. Set model.moe.num_groups to one of {divisors(moe.num_experts)}."
        )
        return
    if chosen > groups:
        yield f"{settings}: there are not so many groups to choose. Lower model.moe.top_groups."
        return
    if chosen * (moe.num_experts // groups) < moe.top_k:
        yield (
            f"{settings} leave {chosen * (moe.num_experts // groups)} experts to choose from, fewer than "
            f"model.moe.top_k={moe.top_k}. Choose more groups."
        )
    elif moe.num_experts // groups < (best := family.experts_in_group_score or 0):
        yield (
            f"model.moe.num_groups={groups} with model.moe.num_experts={moe.num_experts}: a group has "
            f"{moe.num_experts // groups} experts, and {model.family} ranks it by its best {best}. Choose fewer groups."
        )


@dataclass(frozen=True, slots=True)
class Width:
    """One side of a weight."""

    name: str
    """Field, or product of fields."""
    size: int
    ranks: int = 1
    """Number of ranks over which it is cut."""
    axis: str = "tp"
    """Field of the mesh with that number."""


def fp8_violations(
    model: ModelConfig, mesh: MeshConfig, platform: PlatformConfig, micro_batch: int, seq_length: int, field: str
) -> Iterator[str]:
    """Yield a sentence for each width or token count that 8-bit products refuse; `field` is of `seq_length`."""
    multiple = platform.fp8_multiple
    if multiple == 1:
        return
    recipe = f'platform.fp8_recipe="{platform.fp8_recipe}"'
    remedy = ""
    if platform.fp8_recipe == "auto":
        recipe += ", which is mxfp8 on Blackwell,"
        remedy = ' or, for other GPUs and multiples of 16, another recipe than "auto" and "mxfp8"'
    for width in _widths(model, mesh):
        here, rest = divmod(width.size, width.ranks)
        if rest or not here % multiple:  # the checks of the mesh refuse a width that does not divide
            continue
        cut = f" / mesh.{width.axis}={width.ranks} = {here}" if width.ranks > 1 else ""
        yield (
            f"{width.name} = {width.size}{cut} is not a multiple of {multiple}, as {recipe} needs of the widths on a "
            f'rank. Make it {_near(width.size, multiple * width.ranks)}, or set platform.fp8="none"{remedy}.'
        )
    slices = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
    tokens, rest = divmod(micro_batch * seq_length, slices)
    if not rest and tokens % multiple:
        unit = multiple * slices
        near = _near(seq_length, unit // gcd(unit, micro_batch))
        yield (
            f"{field}={seq_length} x train.micro_batch={micro_batch} on {slices} ranks are {tokens} tokens each, not a "
            f"multiple of {multiple}, as {recipe} needs. Make {field} {near}, or "
            f'set platform.fp8="none"{remedy}.'
        )


def _widths(model: ModelConfig, mesh: MeshConfig) -> Iterator[Width]:
    """Yield the sides of the weights that TransformerEngine multiplies: no embedding, output or router."""
    family, mla, moe = family_of(model), model.mla, model.moe
    yield Width("model.hidden_size", model.hidden_size)
    if family.is_latent:
        if mla.q_lora_rank is not None:
            yield Width("model.mla.q_lora_rank", mla.q_lora_rank)
        yield Width("model.mla.kv_lora_rank", mla.kv_lora_rank)
        yield Width("model.mla.kv_lora_rank + qk_rope_head_dim", mla.kv_lora_rank + mla.qk_rope_head_dim)
        for name, size in (
            ("(qk_nope_head_dim + qk_rope_head_dim)", mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            ("(qk_nope_head_dim + v_head_dim)", mla.qk_nope_head_dim + mla.v_head_dim),
            ("v_head_dim", mla.v_head_dim),
        ):
            yield Width(f"model.num_heads x model.mla.{name}", model.num_heads * size, mesh.tp)
    else:
        groups = max(model.num_kv_heads, mesh.tp)  # a rank has at least one
        yield Width("model.num_heads x model.head_dim", model.num_heads * model.head_dim, mesh.tp)
        yield Width(
            "(model.num_heads + 2 x model.num_kv_heads) x model.head_dim",
            (model.num_heads + 2 * groups) * model.head_dim,
            mesh.tp,
        )
    if not all(model.moe_layers):
        yield Width("model.ffn_hidden_size", model.ffn_hidden_size, mesh.tp)
    if model.is_moe:
        yield Width("model.moe.ffn_hidden_size", moe.ffn_hidden_size, mesh.etp, "etp")
    if moe.shared_experts and model.is_moe:
        yield Width("the shared experts' width", moe.shared_width, mesh.tp)


def _near(size: int, multiple: int) -> str:
    below = size // multiple * multiple
    return " or ".join(str(near) for near in (below, below + multiple) if near)


def lora_violations(lora: LoraConfig, config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each reason why the model of `config` cannot have these low-rank adapters."""
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.weights == "adapters" and not (lora.is_on and checkpoint.load):
        lacks = "checkpoint.load names no base" if lora.is_on else 'lora.rank="none" has no adapters'
        yield f'checkpoint.weights="adapters", and {lacks}: the weights would be lost. Set it, or weights="all".'
    yield from unused("lora", lora, (not lora.is_on, "", 'lora.rank="none", which trains no adapters'))
    if not lora.is_on:
        return
    yield from _targets(lora, model)
    yield from layer_violations(lora, config.mesh, model, config.platform)
    if config.trains_mtp and model.mtp_layers:
        yield (
            f"lora.rank={lora.rank} with model.mtp_layers={model.mtp_layers}: layers of multi-token prediction "
            "get no adapters, and would no longer fit the layers before them. Set model.mtp_layers=0; "
            "`mcore-rl convert import --mtp drop` and `relayout` leave the layers out."
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
                f"be of nothing. Name some of {', '.join(there)}."
            )
    if len(set(targets)) < len(targets):
        yield f"lora.targets={toml_value(list(targets))} names a kind of modules twice. Name each once."
    cause = 'lora.targets without "experts": routed experts have no adapters here'
    yield from unused("lora", lora, ("experts" not in targets, "expert_rank expert_gate_up", cause))


def layer_violations(lora: LoraConfig, mesh: MeshConfig, model: ModelConfig, platform: PlatformConfig) -> Iterator[str]:
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


MAX_CODES = 2**15


def replay_violations(replay: ReplayConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a sentence, with its remedy, for each reason why `replay` cannot run with the policy `model`."""
    yield from unused(
        "replay",
        replay,
        (replay.split_interval is None, "split_layers", 'replay.split_interval="none", which divides no mismatch'),
        (not model.is_moe, "split_interval observe_rollout", "a model without experts, which routes no token"),
        (replay.kind == "none", "reference missing", 'replay.kind="none", which imposes no routes'),
        (replay.kind == "r2", "missing", 'replay.kind="r2", in which the trainer records every route'),
    )
    if replay.split_layers is not None and replay.missing == "live":
        yield (
            f'replay.split_layers={replay.split_layers} with replay.missing="live": tokens without routes have '
            'no part by layer. Set replay.split_layers=none, or replay.missing="error".'
        )
    if replay.kind == "none":
        return
    if not model.is_moe:
        yield (
            f'replay.kind="{replay.kind}" with model.family="{model.family}" and no experts: no token is routed. '
            'Set replay.kind="none".'
        )
        return
    codes = model.moe.num_experts * (2 if model.moe.capacity_factor else 1)
    if codes > MAX_CODES:
        yield (
            f"model.moe.num_experts={model.moe.num_experts} with replay: a route is stored in 16 bits with a sign. "
            'Set replay.kind="none".'
        )
    if replay.kind == "r3" and model.moe.capacity_factor:
        yield (
            f'replay.kind="r3" with model.moe.capacity_factor={model.moe.capacity_factor}: the rollout engine '
            "drops no token, so that its routes do not say what the trainer has to drop. Set capacity_factor=none, or "
            'replay.kind="r2", which imposes what the pass for old logprobs dropped.'
        )
