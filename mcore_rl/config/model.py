"""The sections `model`, `model.moe`, `model.mla`, `model.delta` and `model.rope`: the shape of a model."""

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Probability, Section, Text

Switch = Literal["auto", "on", "off"]
Mixer = Literal["attention", "delta"]
"""The part of a layer that mixes positions: softmax attention, or a gated delta net."""


class LayerKind(NamedTuple):
    """Layers of a kind have weights of the same shapes, keep the same activations and take the same time."""

    mixer: Mixer
    is_moe: bool
    """True where tokens are routed to experts."""


class MoEConfig(Section):
    """Experts and router; a dense family ignores this section and refuses `num_experts > 0`."""

    num_experts: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of routed experts in a layer; 0: a dense model."""
    top_k: PositiveInt = 2
    """Number of experts that a token is sent to."""
    ffn_hidden_size: NonNegativeInt = 0
    """Inner width of one routed expert."""
    shared_experts: NonNegativeInt = 0
    """Number of experts that every token passes, built as one MLP."""
    shared_ffn_hidden_size: PositiveInt | Literal["auto"] = "auto"
    """Inner width of one shared expert; `auto`: `ffn_hidden_size`."""
    first_dense_layers: NonNegativeInt = 0
    """Number of first layers that have a dense MLP of width `model.ffn_hidden_size` instead of experts."""
    normalize_top_k: bool = True
    """The gates of the chosen experts sum to one (Hugging Face's `norm_topk_prob`)."""
    num_groups: PositiveInt | None = None
    """Number of groups of experts in group-limited routing (arXiv 2405.04434); `none`: no groups."""
    top_groups: PositiveInt | None = None
    """Number of groups that a token may choose experts from; `none`: no groups."""
    routed_scaling: PositiveFloat = 1.0
    """Factor on the routed experts' gates (Hugging Face's `routed_scaling_factor`)."""
    balance: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"
    """Loss that evens out the experts' load over each micro-batch, each sequence (also where several are packed into a
    row), or the micro-batches of a step so far on all ranks (arXiv 2501.11873)."""
    aux_loss_coeff: NonNegativeFloat = 1e-3
    """Weight of the balance loss, a mean over all tokens but padding, whether or not the loss mask counts them."""
    expert_bias: bool = False
    """Evens out the load by a bias on the choice of experts instead of a loss (arXiv 2408.15664)."""
    expert_bias_rate: NonNegativeFloat = 1e-3
    """Step of the expert bias at each update, the paper's u."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the router z-loss (arXiv 2202.08906), a mean over the same tokens."""
    capacity_factor: PositiveFloat | None = None
    """Number of choices that an expert takes, as a multiple of its even share of a micro-batch on all its tp and cp
    ranks; those with smaller gates are dropped; `none`: an expert takes all."""
    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] = "alltoall"
    """Exchange that sends tokens to their experts; `deepep` and `hybridep` need CUDA and the deep_ep package, the
    latter (for GPUs that NVLink connects across nodes) that of its branch hybrid-ep."""

    @cached_property
    def is_flex(self) -> bool:
        """Whether a library other than NCCL sends the tokens, by Megatron's flex dispatcher."""
        return self.dispatcher in ("deepep", "hybridep")

    @cached_property
    def shared_width(self) -> int:
        """Inner width of the MLP that all shared experts form together."""
        each = self.ffn_hidden_size if self.shared_ffn_hidden_size == "auto" else self.shared_ffn_hidden_size
        return self.shared_experts * each


class MLAConfig(Section):
    """Widths of multi-head latent attention (arXiv 2405.04434); families with grouped queries ignore this section."""

    q_lora_rank: PositiveInt | None = None
    """Rank of the query's down-projection; `none`: queries are projected directly."""
    kv_lora_rank: PositiveInt = 512
    """Rank of the shared key-value latent."""
    qk_nope_head_dim: PositiveInt = 128
    """Width of the part of a head's queries and keys that carries no position."""
    qk_rope_head_dim: PositiveInt = 64
    """Width of the part of a head's queries and keys that is turned by its position."""
    v_head_dim: PositiveInt = 128
    """Width of a head's values."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of the norms of the two latents, which transformers fixes at 1e-6 whatever `model.norm_eps` is."""


class DeltaConfig(Section):
    """Gated delta nets (arXiv 2412.06464), which some families have instead of attention in most layers."""

    full_every: PositiveInt | None = None
    """Every layer of a number divisible by this, counted from 1, attends, and the others are gated delta nets; `none`:
    all attend."""
    key_heads: PositiveInt = 16
    """Number of heads of queries and keys."""
    value_heads: PositiveInt = 32
    """Number of heads of values, each with a state of its own: a multiple of `key_heads`."""
    key_dim: PositiveInt = 128
    """Width of a head's queries and keys."""
    value_dim: PositiveInt = 128
    """Width of a head's values."""
    conv_width: Annotated[int, Field(ge=2)] = 4
    """Number of positions, its own included, that the convolution of queries, keys and values sees."""

    @cached_property
    def query_width(self) -> int:
        """Width of the queries of all heads, and of the keys."""
        return self.key_heads * self.key_dim

    @cached_property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_dim


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: PositiveFloat = 10000.0
    """Base of the wavelengths."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a head's width that is turned."""
    scaling: Literal["none", "yarn", "llama3"] = "none"
    """Method that stretches the wavelengths beyond the first training length."""
    factor: PositiveFloat = 1.0
    """Factor by which `yarn` and `llama3` stretch the context."""
    original_length: PositiveInt = 4096
    """Number of positions of the first training, for `yarn`."""
    truncate: bool = True
    """YaRN rounds the range of partly stretched wavelengths, given by `beta_fast` and `beta_slow`, to whole indices."""
    beta_fast: PositiveFloat = 32.0
    """Number of rotations above which YaRN leaves a wavelength alone."""
    beta_slow: PositiveFloat = 1.0
    """Number of rotations below which YaRN stretches a wavelength fully."""
    mscale: NonNegativeFloat = 1.0
    """YaRN's temperature of the rotary part."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """YaRN's temperature of the whole softmax, in latent attention."""


class ModelConfig(Section):
    """A decoder-only transformer of a known family."""

    path: Text | None = None
    """A folder that is the model: Hugging Face's, an import, a checkpoint or a run, or a name of the hub that is in its
    local cache. From it come this section, the tokenizer and, where `checkpoint.load` is not set, the weights; fields
    that are set beside it override. `none`: this section describes the model."""
    family: str | Extension = "qwen3_moe"
    """Architecture: a name of `mcore_rl.families.FAMILIES` (Hugging Face's `model_type`), or a `Family` of your own."""
    head: Literal["logits", "score"] = "logits"
    """Output of the model: `logits` of every token; `score`: one number, of reward models and critics."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = 4
    """Number of transformer layers, without MTP layers."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_heads: PositiveInt = 8
    """Number of query heads."""
    num_kv_heads: PositiveInt = 4
    """Number of key/value heads (Megatron's query groups)."""
    head_dim: PositiveInt = 32
    """Width of a head; latent attention takes its widths from `model.mla` instead."""
    ffn_hidden_size: PositiveInt = 512
    """Inner width of a dense MLP."""
    vocab_size: PositiveInt = 512
    """Number of tokens that the tokenizer knows, before padding."""
    vocab_multiple: PositiveInt = 128
    """Multiple to which the embedding is padded, so that every mesh has the same rows."""
    max_position: PositiveInt = 4096
    """Length of the longest sequence that the model is meant for, in tokens."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    sliding_window: PositiveInt | None = None
    """Number of positions, its own included, that a token sees in every second layer from the first on; `none`: all."""
    qkv_bias: Switch = "auto"
    """Biases of queries, keys and values; `auto`: the family's default."""
    qk_norm: Switch = "auto"
    """Norms of queries and keys; `auto`: the family's default."""
    tied_embeddings: bool = False
    """Input and output embedding share one weight."""
    attention_dropout: Probability = 0.0
    """Probability that an attention weight is dropped in training."""
    hidden_dropout: Probability = 0.0
    """Probability that an element of a layer's output is dropped in training, before the residual sum."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    mtp_layers: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of multi-token-prediction layers (arXiv 2412.19437). Reinforcement learning keeps them as they are."""
    mtp_loss_coeff: NonNegativeFloat = 0.1
    """Weight of the MTP layers' loss."""
    rope: RopeConfig = RopeConfig()
    moe: MoEConfig = MoEConfig()
    mla: MLAConfig = MLAConfig()
    delta: DeltaConfig = DeltaConfig()

    @cached_property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @cached_property
    def scored(self) -> "ModelConfig":
        """This model with a score in the place of its logits, and without MTP layers: its critic or reward model."""
        return self.model_copy(update={"head": "score", "mtp_layers": 0})

    @cached_property
    def is_moe(self) -> bool:
        """True when some layer routes tokens to experts."""
        return self.moe.num_experts > 0

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """One flag per layer, true where it routes tokens to experts."""
        dense = min(self.moe.first_dense_layers, self.num_layers) if self.is_moe else self.num_layers
        return (False,) * dense + (True,) * (self.num_layers - dense)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        every = self.delta.full_every
        return tuple(
            "delta" if every is not None and (layer + 1) % every else "attention"
            for layer in range(self.num_layers)
        )

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(LayerKind, self.mixers, self.moe_layers))

    @cached_property
    def mtp_kind(self) -> LayerKind:
        """The kind of the transformer layers inside MTP layers: they attend, and route as the last layer does."""
        return LayerKind("attention", self.moe_layers[-1])

    @cached_property
    def all_kinds(self) -> frozenset[LayerKind]:
        """The kinds of all layers, of MTP layers too."""
        return frozenset(self.layer_kinds) | ({self.mtp_kind} if self.mtp_layers else set())

    @cached_property
    def layers_alike(self) -> bool:
        """True when all layers attend, and all or none route: Megatron then stores a weight of all as one tensor."""
        return "delta" not in self.mixers and len(set(self.moe_layers)) == 1
