"""Building the chunks of a model that this rank holds."""

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_rl.backend.platform import Platform
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.model.heads import ScoreModel
from mcore_rl.model.spec import block_spec, mtp_spec
from mcore_rl.model.transformer_config import transformer_config
from mcore_rl.parallel.mesh import Mesh, is_first_chunk, is_last_chunk
from mcore_rl.parallel.vocab import exclude_padding


class LanguageModel(GPTModel):
    """Megatron's model with losses over the `num_tokens` ids of the vocabulary, without the rows that pad it."""

    num_tokens: int

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the cross entropy `[B, s]` of `labels` `[B, s]`; of `logits` `[s, B, v]`, padding is overwritten."""
        exclude_padding(logits, self.pg_collection.tp, self.num_tokens)
        losses: Tensor = super().compute_language_model_loss(labels, logits)
        return losses


def build_model(
    model: ModelConfig, mesh: Mesh, platform: Platform, settings: PlatformConfig
) -> list[nn.Module]:
    """Return this rank's chunks in pipeline order, on the device, with random weights by the states of `seed_ranks`.

    They end in logits or in scores, as `model.head` says.
    """
    config = transformer_config(model, mesh, platform, settings)
    stages = range(mesh.config.vpp) if mesh.config.vpp > 1 else [None]
    return [_build_chunk(config, model, platform, stage) for stage in stages]


def build_uninitialized(
    model: ModelConfig, mesh: Mesh, platform: Platform, settings: PlatformConfig
) -> nn.Module:
    """Return the whole model as one chunk with uninitialized weights, whose memory is not touched yet."""
    config = transformer_config(model, mesh, platform, settings)
    config.perform_initialization = False
    return _build_chunk(config, model, platform, None)


def unwrap(chunk: nn.Module) -> GPTModel:
    """Return the Megatron model inside its wrappers for data parallelism and 16-bit numbers."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def _build_chunk(
    config: TransformerConfig, model: ModelConfig, platform: Platform, vp_stage: int | None
) -> nn.Module:
    te = platform.layers == "te"
    yarn = model.rope.scaling == "yarn" and not config.multi_latent_attention
    chunk = (ScoreModel if model.head == "score" else LanguageModel)(
        config,
        block_spec(config, te=te, vp_stage=vp_stage),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position,
        pre_process=is_first_chunk(vp_stage),
        post_process=is_last_chunk(vp_stage),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="yarn" if yarn else "rope",
        rotary_base=model.rope.theta,
        rotary_percent=model.rope.fraction,
        rope_scaling=model.rope.scaling == "llama3",
        rope_scaling_factor=model.rope.factor,
        mtp_block_spec=mtp_spec(config, te=te, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    if isinstance(chunk, LanguageModel):
        chunk.num_tokens = model.vocab_size
    chunk.model_type = ModelType.encoder_or_decoder
    for name, param in chunk.named_parameters():
        # Megatron 0.16 reduces experts' gradients over the dense data-parallel group when ep = 1, which is wrong for
        # etp != tp. Marked here on every mesh, experts also have an optimizer of their own on every mesh, so that all
        # meshes read the same optimizer checkpoint.
        if ".experts." in name:
            param.allreduce = False
    if platform.is_cuda:
        chunk.cuda(platform.device)
    wrapped: nn.Module = Float16Module(config, chunk) if config.bf16 else chunk
    return wrapped
