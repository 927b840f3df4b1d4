"""The outputs of two checkpoints on the same tokens, each in its own framework: `convert verify --logits`.

This is the only part of the conversion that builds a model and starts a process group, with a single rank. The model is
empty: the weights of a module are read when its forward begins and dropped when it ends, so that only one layer's
weights are in memory at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mcore_rl.backend.platform import start
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.copying.content import fill
from mcore_rl.convert.copying.plan import TargetTensor, chunk_at
from mcore_rl.convert.hf.model import HfModel, MtpLayers
from mcore_rl.convert.hf.source import HfSource
from mcore_rl.convert.megatron.layouts import KeyTranslation, refuse_singletons
from mcore_rl.convert.megatron.model import DistModel
from mcore_rl.convert.megatron.source import DistSource
from mcore_rl.convert.verify import open_model
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import weight_map
from mcore_rl.families.regions import (
    RegionCopy,
    composed,
    copies_into_hf,
    copies_into_megatron,
    whole,
)
from mcore_rl.families.shells import text_config
from mcore_rl.families.weight_map import AxisRange
from mcore_rl.folders.huggingface import is_hf
from mcore_rl.model.build import build_uninitialized, unwrap
from mcore_rl.model.global_tensors import LocalShard, local_shards
from mcore_rl.model.heads import SCORE_SHIFT
from mcore_rl.obs.progress import ByteProgress
from mcore_rl.parallel.mesh import build_mesh, destroy_mesh, seed_ranks

NUM_SEQUENCES, SEQUENCE_LENGTH = 2, 32
"""Size of the batch of random tokens."""
EXPERT_BIAS = "e_score_correction_bias"
TOLERANCE = 2e-5
"""Difference of logits explained by rounding in fp32, relative to the largest logit, or to 1 if that is smaller."""


@dataclass(frozen=True, slots=True)
class OutputDistance:
    """The largest differences between the outputs of two models."""

    logits: float
    """Largest difference of a logit."""
    layers: float
    """Largest difference of a layer's output, relative to the largest output of that layer."""
    largest_logit: float

    @property
    def tolerance(self) -> float:
        """Difference of logits explained by rounding."""
        return TOLERANCE * max(1.0, self.largest_logit)

    @property
    def is_small(self) -> bool:
        """Whether rounding explains the difference of the logits."""
        return self.logits <= self.tolerance


@torch.no_grad()
def largest_distance(
    one: Path,
    other: Path,
    reference: Path | None,
    progress: ByteProgress,
    *,
    mtp: MtpLayers = "keep",
    dtype: torch.dtype | None = None,
) -> OutputDistance:
    """Run both models in fp32 on the same random tokens and return how far apart their outputs are.

    This process must not have Megatron's groups yet.

    Args:
        one: A checkpoint of either format.
        other: The checkpoint to compare with.
        reference: A Hugging Face folder of the same model, for Megatron checkpoints that do not name their family.
        progress: Where progress is shown.
        mtp: Whether MTP layers, which are not compared, may be absent ("drop").
        dtype: Type to which transformers' weights are rounded first, as the other side's were; None for no rounding.

    Raises:
        CheckpointError: The models have different sizes, or either computes a value that is not finite.
        ConfigError: Transformers does not have the model.
    """
    outputs = []
    for path in (one, other):
        known = reference or next((folder for folder in (one, other) if is_hf(folder)), None)
        found = open_model(path, known, mtp)
        tokens_BS = torch.randint(
            0,
            found.model.vocab_size,
            (NUM_SEQUENCES, SEQUENCE_LENGTH),
            generator=torch.Generator().manual_seed(0),
        )
        outputs.append(
            _in_transformers(found, tokens_BS, dtype)
            if isinstance(found, HfModel)
            else _in_megatron(found, tokens_BS)
        )
        _refuse_not_finite(path, outputs[-1])
        progress.event("ran", path=str(path), layers=len(outputs[-1]) - 1)
    (*hidden, logits), (*other_hidden, other_logits) = outputs
    if len(hidden) != len(other_hidden) or logits.shape != other_logits.shape:
        raise CheckpointError(
            f"{one} has {len(hidden)} layers and {logits.shape[-1]} tokens, {other} {len(other_hidden)} and "
            f"{other_logits.shape[-1]}: these are different models."
        )
    apart = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(hidden, other_hidden, strict=True)]
    for layer, distance in enumerate(apart):
        progress.event("layer", layer=layer, relative_distance=distance)
    return OutputDistance(float((logits - other_logits).abs().max()), max(apart), float(logits.abs().max()))


def _refuse_not_finite(path: Path, outputs: Sequence[Tensor]) -> None:
    """Raise a CheckpointError that names the first layer with NaN or infinite values in its output."""
    bad = [layer for layer, output in enumerate(outputs) if not output.isfinite().all()]
    if bad:
        where = "head" if bad[0] == len(outputs) - 1 else f"layer {bad[0]}"
        raise CheckpointError(
            f"{path} computes NaN or infinite values, first in its {where}: no logits can be compared. Its weights "
            "have such values, or become them in the type that --dtype names."
        )


def is_in_transformers(model_type: object) -> bool:
    """Return whether transformers has the code of a model."""
    return model_type in transformers.CONFIG_MAPPING


def _in_transformers(found: HfModel, tokens_BS: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Run transformers' model, in which only the current module has weights, rounded to `dtype`.

    Returns each layer's output `[B, S, D]`, and last the logits `[B, S, V]`.
    """
    text = text_config(found.folder.config or {})
    model_type = text.get("model_type")
    if not is_in_transformers(model_type):
        raise ConfigError(
            f"{found.folder.path} has model_type {model_type!r}, which transformers does not have: there is nothing to "
            "compare the logits with. Leave out --check-logits or --logits."
        )
    if text is found.folder.config:
        config = transformers.AutoConfig.from_pretrained(found.folder.path)
    else:  # within a model of images, under the names of the text model's own class
        config = transformers.AutoConfig.for_model(**text)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    is_scored = found.model.head == "score"
    kind = transformers.AutoModelForSequenceClassification if is_scored else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
    _restore_wavelengths(model, config)
    model.eval()
    load = partial(_load_hf, found, _copies_of_modules(found), found.source(), dtype)
    names = {module: name for name, module in model.named_modules()}
    head = model.score if is_scored else model.lm_head
    units = [model.model.embed_tokens, *model.model.layers, model.model.norm, head]

    def enter(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        for name, tensor in module.state_dict(prefix=f"{names[module]}.").items():
            load(name, tensor)

    def leave(module: nn.Module) -> None:
        module.to("meta")

    with _outputs_of(units, enter, leave) as outputs:
        # Call the inner model: a model with scores would only return the scores of the last tokens.
        hidden = model.model(tokens_BS, use_cache=False).last_hidden_state
        logits: Tensor = head(hidden)
    # Leave out the outputs of the embedding at the beginning, and of the last norm and the head at the end.
    return [*outputs[1:-2], logits]


def _load_hf(
    found: HfModel,
    copies: Mapping[str, list[RegionCopy]],
    source: HfSource,
    dtype: torch.dtype | None,
    name: str,
    tensor: Tensor,
) -> None:
    """Fill a parameter of transformers' model from the folder's tensors, rounded to the type that an import has."""
    originals = {duplicate.name: duplicate.original for duplicate in found.weights.copies}
    name = originals.get(name, name)
    # The biases of the choice of experts stay as they are. Quantized weights are read as the model's type.
    stored = {found.dtype(copy.source) for copy in copies[name]}
    exact = name.endswith(EXPERT_BIAS) or (dtype is None and len(stored) > 1)
    read_as = torch.float32 if exact else dtype or next(iter(stored))
    target = TargetTensor(name=name, shape=tuple(tensor.shape), dtype=read_as, copies=tuple(copies[name]))
    tensor.copy_(fill(chunk_at(target, whole(target.shape)), source))


def _copies_of_modules(found: HfModel) -> dict[str, list[RegionCopy]]:
    """Return the copies that make transformers' parameters, with fused experts, from the files' tensors."""
    through = copies_into_megatron(found.weights.blocks)
    inner = copies_into_hf(weight_map(found.model, "fused").blocks)
    return {name: composed(copies, through) for name, copies in inner.items()}


def _restore_wavelengths(model: nn.Module, config: Any) -> None:
    """Compute the buffers that follow from the config and are in no checkpoint: the meta device has no values."""
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            restored = type(module)(config=config)
            for name, buffer in restored.named_buffers(recurse=False):
                setattr(module, name, buffer)


def _in_megatron(found: DistModel, tokens_BS: Tensor) -> list[Tensor]:
    """Run Megatron's model on one rank; only the current module has storage.

    Returns each layer's output `[B, S, D]`, and last the logits `[B, S, V]`.
    """
    refuse_singletons(found.layout, found.folder.path)
    settings = PlatformConfig(precision="fp32", layers="torch")
    platform, mesh = start(settings), build_mesh(MeshConfig())
    seed_ranks(1)
    try:
        model = found.model.model_copy(update={"mtp_layers": 0})
        built = build_uninitialized(model, mesh, platform, settings).eval()
        chunk = unwrap(built)
        by_storage: dict[int, list[LocalShard]] = {}
        for shard in local_shards([built]):
            by_storage.setdefault(_storage_id(shard.data), []).append(shard)
        load = partial(_load_shard, KeyTranslation(found.model, found.layout), found.source())
        has_tied_output = found.model.tied_embeddings and found.model.head == "logits"
        tied = [chunk.embedding] if has_tied_output else []
        holders: dict[nn.Module, Sequence[nn.Module]] = {chunk.output_layer: [chunk.output_layer, *tied]}
        units = [chunk.embedding, *chunk.decoder.layers, chunk.decoder.final_layernorm, chunk.output_layer]

        def enter(module: nn.Module) -> None:
            for tensor in _tensors(holders.get(module, [module])):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                for shard in by_storage.get(_storage_id(tensor), ()):
                    load(shard)

        def leave(module: nn.Module) -> None:
            for tensor in _tensors(holders.get(module, [module])):
                tensor.untyped_storage().resize_(0)

        for unit in units:
            leave(unit)
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        with _outputs_of(units, enter, leave) as outputs:
            logits = chunk(input_ids=tokens_BS, position_ids=positions_BS, attention_mask=None)
        return [*(hidden.transpose(0, 1) for hidden in outputs[1:-2]), logits[..., : found.model.vocab_size]]
    finally:
        destroy_mesh()


def _load_shard(translation: KeyTranslation, source: DistSource, shard: LocalShard) -> None:
    """Fill a parameter, or a part of a parameter, of Megatron's model from the checkpoint's tensors."""
    if shard.key == SCORE_SHIFT:
        shard.data.zero_()  # the other format has none
        return
    where = tuple(
        AxisRange(at, at + 1) if isinstance(at, int) else AxisRange(*at.indices(size)[:2])
        for at, size in zip(shard.where, shard.global_shape, strict=True)
    )
    key, there = translation.locate(shard.key, where)
    # Not directly into the shard: a storage that numpy has filled cannot be resized to zero any more.
    read = torch.empty_like(shard.data)
    source.fill(read, key, there)
    shard.data.copy_(read)


def _tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield parameters and saved buffers."""
    for module in modules:
        yield from (
            tensor for tensor in module.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)
        )


def _storage_id(tensor: Tensor) -> int:
    """Return an id of the tensor's storage; unlike an address, an empty storage has it too."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _outputs_of(
    units: Sequence[nn.Module], enter: Callable[[nn.Module], None], leave: Callable[[nn.Module], None]
) -> Iterator[list[Tensor]]:
    """Collect the output of each unit, in order; `enter` and `leave` are called around its forward."""
    outputs: list[Tensor] = []

    def before(module: nn.Module, _: Any) -> None:
        enter(module)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())
        leave(module)

    hooks = [unit.register_forward_pre_hook(before) for unit in units]
    hooks += [unit.register_forward_hook(after) for unit in units]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
