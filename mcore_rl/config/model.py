"""The sections `model`, `model.moe`, `model.mla`, `model.indexer`, `model.delta` and `model.rope`: a model's shape."""

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Probability, Section, Text

Switch = Literal["auto", "on", "off"]
Mixer = Literal["attention", "indexed", "shared", "delta"]
"""The part of a layer that mixes positions: softmax attention over all earlier positions, over those that an indexer of
the layer chooses, over those that the last indexer before it has chosen, or a gated delta net."""


class LayerKind(NamedTuple):
    """Layers of the same kind have weights of the same shapes, keep the same activations and take the same time."""

    mixer: Mixer
    is_moe: bool
    """Whether tokens are routed to experts."""


class MoEConfig(Section):
    """Experts and router; a dense family ignores this section and refuses `num_experts > 0`."""

    num_experts: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of routed experts per layer; 0: no experts, a dense model."""
    top_k: PositiveInt = 2
    """Number of experts that a token is sent to."""
    ffn_hidden_size: NonNegativeInt = 0
    """Inner width of a routed expert."""
    shared_experts: NonNegativeInt = 0
    """Number of experts that every token passes through, built as a single MLP; 0: none."""
    shared_ffn_hidden_size: PositiveInt | Literal["auto"] = "auto"
    """Inner width of a shared expert; `auto`: `ffn_hidden_size`."""
    first_dense_layers: NonNegativeInt = 0
    """Number of layers, from the first, that have a dense MLP (`model.ffn_hidden_size`) instead of experts."""
    normalize_top_k: bool = True
    """Scale the gates of the chosen experts to a sum of 1 (Hugging Face's `norm_topk_prob`)."""
    num_groups: PositiveInt | None = None
    """Number of groups of experts in group-limited routing (arXiv 2405.04434); `none`: no groups."""
    top_groups: PositiveInt | None = None
    """Number of groups that a token may choose experts from; `none`: no groups."""
    routed_scaling: PositiveFloat = 1.0
    """Factor on the gates of routed experts (Hugging Face's `routed_scaling_factor`)."""
    balance: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"
    """Loss that balances the load of the experts. `aux_loss`: over each micro-batch. `seq_aux_loss`: over each
    sequence, even if several are packed together. `global_aux_loss`: over all micro-batches of a step so far, on all
    ranks (arXiv 2501.11873)."""
    aux_loss_coeff: NonNegativeFloat = 1e-3
    """Weight of the balance loss, a mean over all tokens except padding, whether or not the loss mask counts them; 0:
    off."""
    expert_bias: bool = False
    """Balance the load by a bias on the choice of experts, instead of a loss (arXiv 2408.15664)."""
    expert_bias_rate: NonNegativeFloat = 1e-3
    """Amount by which each update changes the expert bias (u in the paper)."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the router z-loss (arXiv 2202.08906), a mean over the same tokens as the balance loss; 0: no z-loss."""
    capacity_factor: PositiveFloat | None = None
    """Maximum number of tokens that an expert accepts, as a multiple of its even share of a micro-batch on all its tp
    and cp ranks. An expert drops the tokens with the smallest gates; `none`: no limit."""
    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] = "alltoall"
    """Exchange that sends tokens to their experts. `deepep` and `hybridep` need CUDA and the deep_ep package;
    `hybridep`, for GPUs that NVLink connects across nodes, needs its branch hybrid-ep."""

    @cached_property
    def is_flex(self) -> bool:
        """Whether a library other than NCCL sends the tokens, by Megatron's flex dispatcher."""
        return self.dispatcher in ("deepep", "hybridep")

    @cached_property
    def shared_width(self) -> int:
        """Inner width of the single MLP that all shared experts form."""
        each = self.ffn_hidden_size if self.shared_ffn_hidden_size == "auto" else self.shared_ffn_hidden_size
        return self.shared_experts * each


class MLAConfig(Section):
    """Widths of multi-head latent attention (arXiv 2405.04434); families with grouped queries ignore this section."""

    q_lora_rank: PositiveInt | None = None
    """Rank of the queries' down-projection; `none`: queries are projected directly."""
    kv_lora_rank: PositiveInt = 512
    """Rank of the latent that keys and values share."""
    qk_nope_head_dim: PositiveInt = 128
    """Width of the part of a head's queries and keys that has no position."""
    qk_rope_head_dim: PositiveInt = 64
    """Width of the part of a head's queries and keys that the position rotates."""
    v_head_dim: PositiveInt = 128
    """Width of a head's values."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of the norms of both latents. transformers fixes it at 1e-6, whatever `model.norm_eps` is."""


class IndexerConfig(Section):
    """The indexer of DeepSeek sparse attention (arXiv 2512.02556), which chooses the keys that a query attends to."""

    top_k: PositiveInt | None = None
    """Number of keys that a query attends to; shorter sequences attend to all keys. `none`: no indexer."""
    heads: PositiveInt = 64
    """Number of heads that score the keys."""
    width: PositiveInt = 128
    """Width of each of these heads; the position rotates its first `model.mla.qk_rope_head_dim` numbers."""
    # Not strict: checkpoints have the section as JSON, which has lists alone.
    shared_layers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = ()
    """Indices, from 0, of layers without an indexer, which use the keys that the last indexer before them chose."""


class DeltaConfig(Section):
    """Gated delta nets (arXiv 2412.06464), which replace attention in most layers of some families."""

    full_every: PositiveInt | None = None
    """Interval of layers with attention: every `full_every`-th layer, counted from 1, has it, and all other layers are
    gated delta nets. `none`: all layers have attention."""
    key_heads: PositiveInt = 16
    """Number of heads of queries and keys."""
    value_heads: PositiveInt = 32
    """Number of heads of values, each with its own state; a multiple of `key_heads`."""
    key_dim: PositiveInt = 128
    """Width of a head's queries and keys."""
    value_dim: PositiveInt = 128
    """Width of a head's values."""
    conv_width: Annotated[int, Field(ge=2)] = 4
    """Number of positions, including its own, that the convolution of queries, keys and values covers."""

    @cached_property
    def query_width(self) -> int:
        """Width of the queries of all heads, and of their keys."""
        return self.key_heads * self.key_dim

    @cached_property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_dim


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: PositiveFloat = 10000.0
    """Base of the wavelengths; a larger base has longer wavelengths."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a head's width that is rotated; 1: all of it."""
    scaling: Literal["none", "yarn", "llama3"] = "none"
    """Method that stretches the wavelengths beyond the original training length; `none`: they are not stretched."""
    factor: PositiveFloat = 1.0
    """Factor by which `yarn` and `llama3` stretch the context."""
    original_length: PositiveInt = 4096
    """Original training length in positions, for `yarn`; `llama3` accepts only 8192, which Megatron has built in."""
    truncate: bool = True
    """Round the range of wavelengths that YaRN stretches partly (`beta_fast` to `beta_slow`) to whole indices."""
    beta_fast: PositiveFloat = 32.0
    """Rotations within the original length above which YaRN leaves a wavelength unchanged."""
    beta_slow: PositiveFloat = 1.0
    """Rotations within the original length below which YaRN stretches a wavelength fully."""
    mscale: NonNegativeFloat = 1.0
    """YaRN's temperature for the rotary part."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """YaRN's temperature for the whole softmax, in latent attention."""


class ModelConfig(Section):
    """A decoder-only transformer of a known family."""

    path: Text | None = None
    """Model to start from: a folder in Hugging Face format, an import, a checkpoint or a run; or the name of a hub
    model in the local cache. It provides this section, the tokenizer and, unless `checkpoint.load` is set, the weights.
    Fields that are set explicitly override it. `none`: this section describes the model."""
    family: str | Extension = "qwen3_moe"
    """Architecture: a name in `mcore_rl.families.FAMILIES` (Hugging Face's `model_type`), or a `Family` of your own."""
    head: Literal["logits", "score"] = "logits"
    """Output of the model. `logits`: logits for every token. `score`: a number, for reward models and critics."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = 4
    """Number of transformer layers, not counting multi-token-prediction layers."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_heads: PositiveInt = 8
    """Number of query heads."""
    num_kv_heads: PositiveInt = 4
    """Number of key/value heads (Megatron's query groups)."""
    head_dim: PositiveInt = 32
    """Width of a head; with latent attention, `model.mla` has the widths instead."""
    ffn_hidden_size: PositiveInt = 512
    """Inner width of a dense MLP."""
    vocab_size: PositiveInt = 512
    """Number of tokens in the tokenizer's vocabulary, before padding."""
    vocab_multiple: PositiveInt = 128
    """Multiple to which the rows of the embedding are padded, so that every mesh has the same number."""
    max_position: PositiveInt = 4096
    """Maximum length of a sequence in tokens; a longer sequence is refused."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    sliding_window: PositiveInt | None = None
    """Positions, including its own, that a token sees in every second layer, from the first on; `none`: all."""
    qkv_bias: Switch = "auto"
    """Biases on queries, keys and values; `auto`: the family's default."""
    qk_norm: Switch = "auto"
    """Norms on queries and keys; `auto`: the family's default."""
    tied_embeddings: bool = False
    """Use the same weights for the input embedding and the output layer."""
    attention_dropout: Probability = 0.0
    """Probability that an attention weight is dropped in training."""
    hidden_dropout: Probability = 0.0
    """Probability that an element of a layer's output is dropped in training, before the residual is added."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    mtp_layers: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of multi-token-prediction layers (arXiv 2412.19437). RL leaves them unchanged."""
    mtp_loss_coeff: NonNegativeFloat = 0.1
    """Weight of the loss of the multi-token-prediction layers."""
    rope: RopeConfig = RopeConfig()
    moe: MoEConfig = MoEConfig()
    mla: MLAConfig = MLAConfig()
    indexer: IndexerConfig = IndexerConfig()
    delta: DeltaConfig = DeltaConfig()

    @cached_property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @cached_property
    def scored(self) -> "ModelConfig":
        """This model with a score head instead of logits and without MTP layers: its critic or reward model."""
        return self.model_copy(update={"head": "score", "mtp_layers": 0})

    @cached_property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return self.moe.num_experts > 0

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """A flag per layer: True if it routes tokens to experts."""
        dense = min(self.moe.first_dense_layers, self.num_layers) if self.is_moe else self.num_layers
        return (False,) * dense + (True,) * (self.num_layers - dense)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        if self.indexer.top_k is not None:
            shared = frozenset(self.indexer.shared_layers)
            return tuple("shared" if layer in shared else "indexed" for layer in range(self.num_layers))
        every = self.delta.full_every
        return tuple(
            "delta" if every is not None and (layer + 1) % every else "attention" for layer in range(self.num_layers)
        )

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(LayerKind, self.mixers, self.moe_layers))

    @cached_property
    def mtp_kind(self) -> LayerKind:
        """The kind of layers inside MTP layers: attention, indexed if any is, with experts if the last layer has."""
        return LayerKind("attention" if self.indexer.top_k is None else "indexed", self.moe_layers[-1])

    @cached_property
    def all_kinds(self) -> frozenset[LayerKind]:
        """The kinds of all layers, including MTP layers."""
        return frozenset(self.layer_kinds) | ({self.mtp_kind} if self.mtp_layers else set())

    @cached_property
    def layers_alike(self) -> bool:
        """Whether all layers are full attention with, or without, experts: Megatron then stacks their weights."""
        return set(self.mixers) == {"attention"} and len(set(self.moe_layers)) == 1
