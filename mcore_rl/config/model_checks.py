"""Whether a model's settings agree with each other and with its family, on whatever mesh."""

from collections.abc import Iterator

from mcore_rl.config.model import MOE_FAMILIES, ModelConfig, MoEConfig

LLAMA3_ORIGINAL_LENGTH = 8192


def model_violations(model: ModelConfig) -> Iterator[str]:
    """One sentence for each disagreement."""
    yield from _family(model)
    yield from _shape(model)
    yield from _rope(model)
    if model.is_moe:
        yield from _router(model)
        yield from _deepseek_only(model)
        yield from _groups(model.moe)


def divisors(number: int) -> str:
    """What divides `number`, for a message: "1, 2, 4, 8"."""
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(found if len(found) <= 10 else [*found[:8], "...", found[-1]])


def _family(model: ModelConfig) -> Iterator[str]:
    experts = model.moe.num_experts
    if model.family in MOE_FAMILIES and not experts:
        dense = "qwen3" if model.family == "qwen3_moe" else "llama"
        yield (
            f'model.family="{model.family}" is a Mixture of Experts, but model.moe.num_experts=0. Set it, or '
            f'use model.family="{dense}".'
        )
    if model.family not in MOE_FAMILIES and experts:
        yield (
            f'model.moe.num_experts={experts}, but model.family="{model.family}" is dense. Set it to 0, or '
            f"use one of the families {', '.join(MOE_FAMILIES)}."
        )
    if model.family != "deepseek_v3" and model.mtp_layers:
        yield (
            f"model.mtp_layers={model.mtp_layers} is known of deepseek_v3 only, not of "
            f'model.family="{model.family}". Set it to 0.'
        )


def _shape(model: ModelConfig) -> Iterator[str]:
    if model.family == "deepseek_v3":
        if model.mla.qk_rope_head_dim % 2:
            yield (
                f"model.mla.qk_rope_head_dim={model.mla.qk_rope_head_dim} is odd: it is turned pairwise. "
                "Make it even."
            )
        return
    if model.head_dim % 2:
        yield f"model.head_dim={model.head_dim} is odd: rotary position turns it pairwise. Make it even."
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not a multiple of "
            f"model.num_kv_heads={model.num_kv_heads}: each key/value head serves as many query heads. Set "
            f"model.num_kv_heads to one of {divisors(model.num_heads)}."
        )


def _rope(model: ModelConfig) -> Iterator[str]:
    rope = model.rope
    if rope.scaling == "none" and rope.factor != 1.0:
        yield (
            f'model.rope.factor={rope.factor} has no effect with model.rope.scaling="none". Set the scaling '
            'to "yarn" or "llama3", or the factor to 1.'
        )
    if rope.scaling != "none" and rope.factor < 1.0:
        yield f"model.rope.factor={rope.factor} would shrink the wavelengths. Set it to 1 or above."
    if rope.scaling == "llama3" and model.family == "deepseek_v3":
        yield 'model.rope.scaling="llama3" is not known of deepseek_v3\'s attention. Use "yarn" or "none".'
    elif rope.scaling == "llama3" and rope.original_length != LLAMA3_ORIGINAL_LENGTH:
        yield (
            f'model.rope.original_length={rope.original_length} with model.rope.scaling="llama3": Megatron '
            f"has {LLAMA3_ORIGINAL_LENGTH} built in. Set it to that."
        )


def _router(model: ModelConfig) -> Iterator[str]:
    moe = model.moe
    if not moe.ffn_hidden_size:
        yield "model.moe.ffn_hidden_size=0: an expert has no width. Set it."
    if moe.top_k > moe.num_experts:
        yield (
            f"model.moe.top_k={moe.top_k} is more than model.moe.num_experts={moe.num_experts}: a token "
            "cannot go to more experts than there are. Lower it."
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


def _deepseek_only(model: ModelConfig) -> Iterator[str]:
    """Megatron's sigmoid router has what these ask for; the softmax router of the others has not."""
    moe = model.moe
    if model.family == "deepseek_v3":
        if moe.top_k > 1 and not moe.normalize_top_k:
            yield (
                f"model.moe.normalize_top_k=false with model.moe.top_k={moe.top_k}: the gates of "
                "deepseek_v3's sigmoid router always sum to one (times model.moe.routed_scaling). Set it to "
                "true."
            )
        return
    for name, neutral in (
        ("shared_experts", 0),
        ("num_groups", 0),
        ("top_groups", 0),
        ("routed_scaling", 1.0),
        ("expert_bias", False),
    ):
        value = getattr(moe, name)
        if value != neutral:
            yield (
                f"model.moe.{name}={value} is known of deepseek_v3 only, not of "
                f'model.family="{model.family}". '
                f"Set it to {neutral}.".replace("False", "false").replace("True", "true")
            )


def _groups(moe: MoEConfig) -> Iterator[str]:
    groups, chosen = moe.num_groups, moe.top_groups
    told = f"model.moe.num_groups={groups} and model.moe.top_groups={chosen}"
    if not (groups and chosen):
        if groups or chosen:
            yield f"{told}: group-limited routing needs both. Set the other, or both to 0."
        return
    if moe.num_experts % groups:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not a multiple of model.moe.num_groups={groups}: "
            f"groups are equally large. Set model.moe.num_groups to one of {divisors(moe.num_experts)}."
        )
        return
    if chosen > groups:
        yield f"{told}: there are not so many groups to choose. Lower model.moe.top_groups."
        return
    if chosen * (moe.num_experts // groups) < moe.top_k:
        yield (
            f"{told} leave {chosen * (moe.num_experts // groups)} experts to choose from, fewer than "
            f"model.moe.top_k={moe.top_k}. Choose more groups."
        )
    # Megatron scores a group by its best top_k // top_groups experts, DeepSeek-V3 by its best two. Where all
    # groups are chosen their scores do not matter.
    if chosen < groups and moe.top_k // chosen != 2:
        yield (
            f"model.moe.top_k={moe.top_k} with model.moe.top_groups={chosen}: Megatron would score a group "
            f"by its best {moe.top_k // chosen} experts, deepseek_v3 is defined by the best 2. Choose top_k "
            "= 2 x top_groups."
        )
