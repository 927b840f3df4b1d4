"""Build this rank's chunks of a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Region
from mcore_rl.megatron.agree import gathered_on
from mcore_rl.megatron.mesh import Axis, Mesh, is_first_chunk, is_last_chunk
from mcore_rl.megatron.platform import Platform
from mcore_rl.megatron.vocab import DeferredLogits, cross_entropy, exclude_padding
from mcore_rl.model.heads import ScoreModel, postprocessed_with_mtp
from mcore_rl.model.spec import INDEXED, block_spec, mtp_spec, output_layer
from mcore_rl.model.transformer_config import transformer_config


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShard:
    """A region of a global tensor, and its memory on this rank."""

    key: str
    where: tuple[int | slice, ...]
    """Region as one int or slice for each axis of the global tensor."""
    global_shape: tuple[int, ...]
    data: Tensor
    """View of the parameter or buffer: writing to it changes the model."""
    is_main: bool
    """True on exactly one rank among those with a copy of the region."""
    copy: int | None = None
    """Index of the data-parallel copy, the same for all shards of a rank's layer; None: on a rank whose tensor- or
    pipeline-parallel peer has the region too, and comes before it."""

    @property
    def region(self) -> Region:
        """`where` as one range for each axis."""
        return tuple(
            AxisRange(at, at + 1) if isinstance(at, int) else AxisRange(*at.indices(size)[:2])
            for at, size in zip(self.where, self.global_shape, strict=True)
        )


def local_shards(chunks: Sequence[nn.Module]) -> Iterator[LocalShard]:
    """Yield every weight and persistent buffer of this rank's chunks."""
    for chunk in chunks:
        model = unwrap(chunk)
        # Megatron needs the group only if an MTP stage has a copy of the embedding.
        state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
        apply_factories(state)
        for tensor in _leaves(state):
            yield LocalShard(
                key=tensor.key,
                where=tensor.global_slice(),
                global_shape=tuple(tensor.global_shape),
                data=tensor.data,
                is_main=is_main_replica(tensor.replica_id),
                copy=None if any(tensor.replica_id[:-1]) else tensor.replica_id[-1],
            )


@torch.no_grad()
def copy_in(chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's weights from global tensors, in their dtype; CheckpointError for a wrong shape or none."""
    for shard in local_shards(chunks):
        source = tensors.get(shard.key)
        if source is None:
            raise CheckpointError(f"no tensor {shard.key} {shard.global_shape} among the {len(tensors)} given")
        if tuple(source.shape) != shard.global_shape:
            raise CheckpointError(f"{shard.key} has shape {tuple(source.shape)}, the model wants {shard.global_shape}")
        shard.data.copy_(source[shard.where])


@torch.no_grad()
def gathered(shards: Sequence[LocalShard], mesh: Mesh, to_rank: int = 0) -> dict[str, Tensor]:
    """Collective over the world: return all ranks' shards as whole CPU tensors on `to_rank`, and {} elsewhere."""
    own = [shard for shard in shards if shard.is_main]
    described = [replace(shard, data=torch.empty_like(shard.data, device="meta")) for shard in own]
    rank = mesh.world.rank
    tensors: dict[str, Tensor] = {}
    of_ranks = gathered_on(to_rank, described or None)
    for shard in own if rank != to_rank else ():
        # By main memory, where they end: `to_rank` may have none of the shards, and so cannot tell their device.
        data = shard.data.detach().cpu().contiguous()
        dist.send(data.view(-1).view(torch.uint8), to_rank, group=mesh.world.group)
    for owner, theirs in enumerate(of_ranks):
        for index, shard in enumerate(theirs or ()):
            if owner == rank:
                data = own[index].data.detach().cpu().contiguous()
            else:
                flat = torch.empty(shard.data.nbytes, dtype=torch.uint8)
                dist.recv(flat, owner, group=mesh.world.group)
                data = flat.view(shard.data.dtype)
            whole = tensors.setdefault(shard.key, torch.empty(shard.global_shape, dtype=shard.data.dtype))
            into = whole[shard.where]
            into.copy_(data.view(into.shape))
    return tensors


def _leaves(state: object) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value)


class LanguageModel(GPTModel):
    """Megatron's model with losses over the `num_tokens` ids of the vocabulary, excluding its padding rows."""

    num_tokens: int
    logits_chunks: tuple[int, int | None]
    """Largest number of positions computed at once, and the chunk size in positions beyond it (None: never chunk)."""
    _chunk_tokens = 0

    def setup_embeddings_and_output_layer(self) -> None:
        """Make the output layer able to defer its product; parameters and checkpoints do not change."""
        if self.post_process:
            assert type(self.output_layer) is ColumnParallelLinear
            self.output_layer.__class__ = output_layer(self.config)
        super().setup_embeddings_and_output_layer()

    def forward(self, *args: Any, defers_logits: bool = False, **kwargs: Any) -> Tensor | DeferredLogits:
        """Return losses if labels are given, else logits, as GPTModel does; `defers_logits` allows `DeferredLogits`."""
        chunk_tokens = None
        if self.post_process and (defers_logits or kwargs.get("labels") is not None):
            most_whole, chunk = self.logits_chunks
            chunk_tokens = None if kwargs["input_ids"].numel() <= most_whole else chunk
        if chunk_tokens is None:
            output: Tensor = super().forward(*args, **kwargs)
            return output
        self.output_layer.is_deferred, self._chunk_tokens = True, chunk_tokens
        try:
            output = super().forward(*args, **kwargs)
        finally:
            self.output_layer.is_deferred = False
        return output if kwargs.get("labels") is not None else self._deferred(output)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the cross entropy `[B, s]` of `labels` `[B, s]` by `logits` `[s, B, v]` or hidden states."""
        tp = self.pg_collection.tp
        if self.output_layer.is_deferred:
            losses_T = cross_entropy(
                self._deferred(logits.flatten(0, 1)),
                labels.t().flatten(),
                Axis(tp, tp.rank(), tp.size()),
                vocab_size=self.num_tokens,
            )
            return losses_T.view(labels.t().shape).t().contiguous()
        exclude_padding(logits, tp, self.num_tokens)
        losses: Tensor = super().compute_language_model_loss(labels, logits)
        return losses

    def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits, or the losses if labels are given; the losses' backward pass includes the MTP losses."""
        if not self.config.mtp_num_layers or not self.post_process:
            return super()._postprocess(*args, **kwargs)
        assert not args, "GPTModel.forward names every argument of _postprocess"
        return postprocessed_with_mtp(self, super()._postprocess, **kwargs)

    def _deferred(self, hidden: Tensor) -> DeferredLogits:
        # An output layer tied to an embedding on this rank has no weight of its own.
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return DeferredLogits(hidden, weight, self._chunk_tokens)


def build_model(model: ModelConfig, mesh: Mesh, platform: Platform, settings: PlatformConfig) -> list[nn.Module]:
    """Return this rank's chunks in pipeline order, on the device, with random weights drawn after `seed_ranks`."""
    config = transformer_config(model, mesh, platform, settings)
    stages = range(mesh.config.vpp) if mesh.config.vpp > 1 else [None]
    return [_build_chunk(config, model, platform, settings, stage) for stage in stages]


def build_uninitialized(model: ModelConfig, mesh: Mesh, platform: Platform, settings: PlatformConfig) -> nn.Module:
    """Return the whole model as a single chunk with uninitialized weights; their memory is not touched yet."""
    config = transformer_config(model, mesh, platform, settings)
    config.perform_initialization = False
    return _build_chunk(config, model, platform, settings, None)


class MegatronModel(Protocol):
    """Attributes of Megatron's language models that we use; a chunk may lack embedding, output layer and MTP layers."""

    config: TransformerConfig
    pg_collection: Any
    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights: bool
    embedding: Any
    rotary_pos_emb: Any
    decoder: Any
    output_layer: Any
    mtp: Any
    shared_embedding_or_output_weight: Callable[[], Tensor]
    sharded_state_dict: Callable[..., dict[str, Any]]
    load_state_dict: Callable[..., Any]
    requires_grad_: Callable[[bool], Any]
    get_submodule: Callable[[str], nn.Module]
    named_modules: Callable[[], Iterator[tuple[str, nn.Module]]]
    named_parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]]
    named_buffers: Callable[[], Iterator[tuple[str, Tensor]]]
    parameters: Callable[[], Iterator[nn.Parameter]]
    buffers: Callable[[], Iterator[Tensor]]

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, attention_mask: None) -> Any:
        """Return logits, or hidden states for the next stage."""


def unwrap(chunk: nn.Module) -> MegatronModel:
    """Return the Megatron model inside its wrappers for data parallelism and 16-bit weights."""
    inner: Any = chunk
    while isinstance(inner, DistributedDataParallel | Float16Module):
        inner = inner.module
    model: MegatronModel = inner
    return model


def settle_weights(chunks: Sequence[nn.Module]) -> None:
    """Collective over the data-parallel ranks: give every rank the weights of the last step, which overlap_param_gather
    gathers only in the next forward pass: other readers would get the step before.
    """
    for chunk in chunks:
        # A chunk that is not trained has no wrapper, and no optimizer steps.
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _build_chunk(
    config: TransformerConfig, model: ModelConfig, platform: Platform, settings: PlatformConfig, vp_stage: int | None
) -> nn.Module:
    yarn = model.rope.scaling == "yarn" and not config.multi_latent_attention
    chunk = (ScoreModel if model.head == "score" else LanguageModel)(
        config,
        block_spec(config, vp_stage=vp_stage),
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
        mtp_block_spec=mtp_spec(config, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    if isinstance(chunk, LanguageModel):
        chunk.num_tokens = model.vocab_size
        chunk.logits_chunks = settings.logits_chunks(model.padded_vocab_size // config.tensor_model_parallel_size)
    if "shared" in model.mixers:
        # Megatron makes the block itself; this one has no further state.
        chunk.decoder.__class__ = import_module(INDEXED).IndexedBlock
    if config.recompute_granularity and chunk.pre_process:
        chunk.embedding.register_forward_hook(_require_gradient)
    chunk.model_type = ModelType.encoder_or_decoder
    for name, param in chunk.named_parameters():
        # Megatron 0.16 reduces experts' gradients over the dense data-parallel group when ep = 1, which is wrong for
        # etp != tp. This marks experts on every mesh, so they also have their own optimizer on every mesh, and all
        # meshes can read the same optimizer checkpoint.
        if ".experts." in name:
            param.allreduce = False
    if platform.is_cuda:
        chunk.cuda(platform.device)
    wrapped: nn.Module = Float16Module(config, chunk) if config.bf16 else chunk
    return wrapped


def _require_gradient(embedding: nn.Module, inputs: Any, output: Tensor) -> None:
    """Make the output of a frozen embedding require a gradient: recomputed layers get none if no input requires it."""
    if torch.is_grad_enabled():
        output.requires_grad_()
