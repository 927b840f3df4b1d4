"""The shape of a model."""

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.section import Probability, Section

Family = Literal[
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "llama",
    "qwen3",
    "qwen2",
    "qwen2_moe",
    "glm4_moe",
    "olmoe",
    "deepseek_v2",
    "gpt_oss",
]
FAMILIES: tuple[str, ...] = get_args(Family)
MOE_FAMILIES = tuple(family for family in FAMILIES if family not in ("llama", "qwen2", "qwen3"))
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
"""Those with multi-head latent attention."""
SIGMOID_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Those whose router has sigmoid scores."""
Switch = Literal["auto", "on", "off"]
OFF: tuple[Switch, ...] = ("off",)
QKV_BIAS: dict[str, tuple[Switch, ...]] = {
    "qwen2": ("on",),
    "gpt_oss": ("on",),
    "qwen2_moe": ("on", "off"),
    "glm4_moe": ("on", "off"),
}
QK_NORM: dict[str, tuple[Switch, ...]] = {
    "qwen3": ("on",),
    "qwen3_moe": ("on",),
    "olmoe": ("on",),
    "glm4_moe": ("off", "on"),
}
"""What a family may have, the default first; families that are not named have none."""


class MoEConfig(Section):
    """Experts and router; ignored by the dense families, which refuse `num_experts > 0`."""

    num_experts: NonNegativeInt = 0
    """Routed experts of a layer; 0: a dense model."""
    top_k: PositiveInt = 2
    """Experts a token is sent to."""
    ffn_hidden_size: NonNegativeInt = 0
    """Inner width of one routed expert."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token passes, as one MLP; qwen2_moe has one and a sigmoid gate on its output."""
    shared_ffn_hidden_size: NonNegativeInt = 0
    """Inner width of one shared expert (qwen2_moe); 0: `ffn_hidden_size`."""
    first_dense_layers: NonNegativeInt = 0
    """How many of the first layers keep a dense MLP of width `model.ffn_hidden_size`."""
    normalize_top_k: bool = True
    """The gates of the chosen experts sum to one (Hugging Face's `norm_topk_prob`)."""
    num_groups: NonNegativeInt = 0
    """Expert groups of group-limited routing (deepseek_v2, deepseek_v3, glm4_moe); 0: none."""
    top_groups: NonNegativeInt = 0
    """Groups a token may choose experts from; 0: none."""
    routed_scaling: PositiveFloat = 1.0
    """Factor on the routed experts' gates (Hugging Face's `routed_scaling_factor`)."""
    balance: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"
    """The loss that evens out the load; over the micro-batch, each sequence, or the global batch."""
    aux_loss_coeff: NonNegativeFloat = 1e-3
    """Weight of the balance loss."""
    expert_bias: bool = False
    """Even out the load by a bias on the choice of experts, not by a loss (arXiv 2408.15664)."""
    expert_bias_rate: NonNegativeFloat = 1e-3
    """Step of the expert bias, the paper's u."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the router z-loss (arXiv 2202.08906)."""
    capacity_factor: NonNegativeFloat = 0.0
    """Tokens an expert takes, as a multiple of the even share; the rest is dropped. 0: none is dropped."""
    dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"
    """How tokens travel to their experts; `deepep` needs CUDA and the deep_ep package."""

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts' MLP."""
        return self.shared_experts * (self.shared_ffn_hidden_size or self.ffn_hidden_size)


class MLAConfig(Section):
    """Multi-head latent attention (arXiv 2405.04434); used by deepseek_v2 and deepseek_v3."""

    q_lora_rank: NonNegativeInt = 0
    """Rank of the query's down-projection; 0: queries are projected directly."""
    kv_lora_rank: PositiveInt = 512
    """Rank of the shared key-value latent."""
    qk_nope_head_dim: PositiveInt = 128
    """Query/key width of a head without position."""
    qk_rope_head_dim: PositiveInt = 64
    """Query/key width of a head with rotary position."""
    v_head_dim: PositiveInt = 128
    """Value width of a head."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of the two norms of latents; transformers has this one whatever `model.norm_eps` is."""


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: PositiveFloat = 10000.0
    """Base of the wavelengths."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How much of a head's width is turned; glm4_moe turns half."""
    scaling: Literal["none", "yarn", "llama3"] = "none"
    """How the wavelengths are stretched beyond the first training length."""
    factor: PositiveFloat = 1.0
    """How far, for `yarn` and `llama3`."""
    original_length: PositiveInt = 4096
    """Positions of the first training, for `yarn`."""
    truncate: bool = True
    """YaRN: the range of wavelengths between those two is rounded to whole ones; gpt_oss does not."""
    beta_fast: PositiveFloat = 32.0
    """YaRN: rotations above which a wavelength is left alone."""
    beta_slow: PositiveFloat = 1.0
    """YaRN: rotations below which a wavelength is fully stretched."""
    mscale: NonNegativeFloat = 1.0
    """YaRN: temperature of the rotary part."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """YaRN: temperature of the whole softmax (deepseek_v2, deepseek_v3)."""


class ModelConfig(Section):
    """A decoder-only transformer of a known family."""

    family: Family = "qwen3_moe"
    """The architecture; Hugging Face's `model_type` of the same name."""
    num_layers: PositiveInt = 4
    """Transformer layers, MTP layers not counted."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_heads: PositiveInt = 8
    """Query heads."""
    num_kv_heads: PositiveInt = 4
    """Key/value heads (query groups)."""
    head_dim: PositiveInt = 32
    """Width of a head (latent attention takes its widths from `mla`)."""
    ffn_hidden_size: PositiveInt = 512
    """Inner width of a dense MLP."""
    vocab_size: PositiveInt = 512
    """Tokens of the tokenizer, before padding."""
    vocab_multiple: PositiveInt = 128
    """The embedding is padded to a multiple of this, so that every mesh has the same rows."""
    max_position: PositiveInt = 4096
    """Longest sequence the model is meant for."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    sliding_window: NonNegativeInt = 0
    """Positions that every second layer sees, from the first on, its own included (gpt_oss); 0: all see all."""
    qkv_bias: Switch = "auto"
    """Biases of queries, keys and values (qwen2, qwen2_moe, glm4_moe, gpt_oss); `auto`: as the family has it."""
    qk_norm: Switch = "auto"
    """Norms of queries and keys (qwen3, qwen3_moe, glm4_moe, olmoe); `auto`: as the family has it."""
    tied_embeddings: bool = False
    """Input and output embedding are one weight."""
    attention_dropout: Probability = 0.0
    """Probability."""
    hidden_dropout: Probability = 0.0
    """Probability."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    mtp_layers: NonNegativeInt = 0
    """Multi-token-prediction layers (deepseek_v3, glm4_moe; arXiv 2412.19437)."""
    mtp_loss_coeff: NonNegativeFloat = 0.1
    """Weight of their loss."""
    rope: RopeConfig = RopeConfig()
    moe: MoEConfig = MoEConfig()
    mla: MLAConfig = MLAConfig()

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return _is_on(self.qkv_bias, QKV_BIAS.get(self.family, OFF))

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed."""
        return _is_on(self.qk_norm, QK_NORM.get(self.family, OFF))

    @property
    def has_full_qk_norm(self) -> bool:
        """Whether these norms are over all heads at once, not over each."""
        return self.family == "olmoe"

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.family in LATENT_FAMILIES

    @property
    def is_moe(self) -> bool:
        """Whether some layer routes tokens to experts."""
        return self.moe.num_experts > 0

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it routes tokens to experts."""
        return tuple(self.is_moe and i >= self.moe.first_dense_layers for i in range(self.num_layers))

    @property
    def layers_alike(self) -> bool:
        """Whether all layers route, or none of a dense family does: Megatron then stores them as one tensor each."""
        return not self.is_moe or all(self.moe_layers)


def _is_on(switch: Switch, choices: tuple[Switch, ...]) -> bool:
    return (choices[0] if switch == "auto" else switch) == "on"
