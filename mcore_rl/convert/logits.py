"""The outputs of two checkpoints on the same tokens, each in its own framework: `convert verify --logits`.

This is the only part of the conversion that builds a model and starts a process group, with a single rank. The model is
empty: the weights of a module are read when its forward begins and dropped when it ends, so that only one layer's
weights are in memory at a time. Transformers loads folders of at most LOGITS_BYTES itself, without the conversion's
reading, unless they are quantized or have no index.
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

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.check import LOGITS_BYTES, open_model
from mcore_rl.convert.copying.tensors import TargetTensor, chunk_at, fill
from mcore_rl.convert.hf.folder import INDEX, SINGLE
from mcore_rl.convert.hf.model import QUANTIZATION, HfModel, HfSource, MtpLayers, with_quantization
from mcore_rl.convert.megatron.model import DistModel, KeyTranslation, refuse_singletons
from mcore_rl.convert.megatron.tensors import DistSource
from mcore_rl.errors import CheckpointError, ConfigError, McoreRlError
from mcore_rl.families import weight_map
from mcore_rl.families.shells import text_config
from mcore_rl.families.weight_map import Copies, composed, copies_into_hf, copies_into_megatron, listed, whole
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.progress import ByteProgress
from mcore_rl.model.build import LocalShard, build_uninitialized, local_shards, unwrap
from mcore_rl.storage.checkpoint import SCORE_SHIFT
from mcore_rl.storage.folders import is_hf

NUM_SEQUENCES, SEQUENCE_LENGTH = 2, 32
"""Size of the batch of random tokens."""
NUM_ROUNDED = 5
"""Number of further copies of the batch, in which the numbers between layers change by one unit in the last place."""
ROUNDING = 4.0
"""Difference of a sequence's logits that rounding explains, relative to the largest difference among its copies.
Megatron's models and transformers' differ by at most 1.3 times as much, in all families, with 3 to 24 layers."""
EXPERT_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class OutputDistance:
    """The largest differences between the outputs of two models."""

    logits: float
    """Largest difference of a logit, in the sequence where it exceeds the tolerance most or comes closest to it."""
    layers: float
    """Largest difference of a layer's output, relative to the largest output of that layer."""
    tolerance: float
    """Difference of that sequence's logits explained by rounding."""

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
    """Run both models in fp32 on the same random tokens and return how far apart their outputs are. This process must
    not have Megatron's groups yet; transformers' weights are rounded to `dtype` first, if given. Raises CheckpointError
    for models of different sizes and values that are not finite, ConfigError if transformers does not have the model.
    """
    outputs: list[list[Tensor]] = []
    for path in (one, other):
        known = reference or next((folder for folder in (one, other) if is_hf(folder)), None)
        found = open_model(path, known, mtp)
        tokens_BS = torch.randint(
            0, found.model.vocab_size, (NUM_SEQUENCES, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(0)
        ).repeat(1 if outputs else 1 + NUM_ROUNDED, 1)
        try:
            outputs.append(
                _in_transformers(found, tokens_BS, dtype)
                if isinstance(found, HfModel)
                else _in_megatron(found, tokens_BS)
            )
        except Exception as error:
            # Transformers' models raise anything for a config that they do not expect; an error of ours is a bug.
            if isinstance(error, McoreRlError) or isinstance(found, DistModel):
                raise
            reason = f"{type(error).__name__}: {error}. To convert it all the same: --no-check-logits."
            raise CheckpointError(f"transformers cannot run {path}: {reason}") from error
        _refuse_not_finite(path, outputs[-1])
        progress.event("ran", path=str(path), layers=len(outputs[-1]) - 1)
    clean = [[output[:NUM_SEQUENCES] for output in side] for side in outputs]
    (*hidden, logits), (*other_hidden, other_logits) = clean
    if len(hidden) != len(other_hidden) or logits.shape != other_logits.shape:
        raise CheckpointError(
            f"{one} has {len(hidden)} layers and {logits.shape[-1]} tokens, {other} {len(other_hidden)} and "
            f"{other_logits.shape[-1]}: these are different models."
        )
    apart = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(hidden, other_hidden, strict=True)]
    for layer, distance in enumerate(apart):
        progress.event("layer", layer=layer, relative_distance=distance)
    copies = outputs[0][-1].split(NUM_SEQUENCES)[1:]
    # Apart for each sequence: where rounding chooses another expert, it explains much in that sequence alone.
    allowed_B = ROUNDING * torch.stack([(copy - logits).abs().amax((1, 2)) for copy in copies]).amax(0)
    found_B = (logits - other_logits).abs().amax((1, 2))
    worst = int((found_B - allowed_B).argmax())
    return OutputDistance(float(found_B[worst]), max(apart), float(allowed_B[worst]))


def _refuse_not_finite(path: Path, outputs: Sequence[Tensor]) -> None:
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
    """Run transformers' model; return each layer's output `[B, S, D]`, and last the logits `[B, S, V]`."""
    path, whole_config = found.folder.path, found.folder.config or {}
    text, model_type = text_config(whole_config), whole_config.get("model_type")
    if not is_in_transformers(model_type):
        raise ConfigError(
            f"{path} has model_type {model_type!r}, which transformers does not have: there is nothing to compare the "
            "logits with. Leave out --check-logits or --logits."
        )
    is_scored, is_text = found.model.head == "score", text is whole_config
    is_small = sum(found.folder.files.values()) <= LOGITS_BYTES
    is_found = found.folder.files.keys() == {SINGLE} or (path / INDEX).is_file()
    is_whole = is_small and is_found and not with_quantization(whole_config).get(QUANTIZATION)
    kind = transformers.AutoModelForSequenceClassification if is_scored else transformers.AutoModelForCausalLM
    if is_whole:
        kind = kind if is_text else transformers.AutoModelForImageTextToText
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        report_options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **report_options)
        if lacking := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
            raise CheckpointError(f"transformers lacks tensors of {path} in their shapes:\n{listed(lacking)}")
        for parameter in model.parameters() if dtype is not None else ():  # biases of experts are buffers
            parameter.copy_(parameter.to(dtype))
    else:
        # In a model of images, the class of the text model.
        config = transformers.AutoConfig.for_model(**text)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
        _restore_wavelengths(model, config)
        # Transformers' parameters have fused experts; they come from the files' tensors through Megatron's.
        through = copies_into_megatron(found.weights.blocks)
        fused = copies_into_hf(weight_map(found.model, "fused").blocks)
        copies_of = {name: composed(copies, through) for name, copies in fused.items()}
        load = partial(_load_hf, found, copies_of, found.source(), dtype)
        names = {module: name for name, module in model.named_modules()}
    model.eval()
    decoder = getattr(model.model, "language_model", model.model)
    head = model.score if is_scored else model.lm_head
    units = [decoder.embed_tokens, *decoder.layers, decoder.norm, head]

    def enter(module: nn.Module) -> None:
        if not is_whole:
            module.to_empty(device="cpu")
            for name, tensor in module.state_dict(prefix=f"{names[module]}.").items():
                load(name, tensor)

    def leave(module: nn.Module) -> None:
        if not is_whole:
            module.to("meta")

    with _outputs_of(units, enter, leave) as outputs:
        # Call the inner model: a model with scores would only return the scores of the last tokens.
        hidden = model.model(input_ids=tokens_BS, use_cache=False).last_hidden_state
        logits: Tensor = head(hidden)
    # Leave out the outputs of the embedding at the beginning, and of the last norm and the head at the end.
    return [*outputs[1:-2], logits]


def _load_hf(
    found: HfModel, copies: Mapping[str, Copies], source: HfSource, dtype: torch.dtype | None, name: str, tensor: Tensor
) -> None:
    originals = {duplicate.name: duplicate.original for duplicate in found.weights.copies}
    name = originals.get(name, name)
    # The biases of the choice of experts stay as they are. Quantized weights are read as the model's type.
    stored = {found.dtype(copy.source) for copy in copies[name]}
    exact = name.endswith(EXPERT_BIAS) or (dtype is None and len(stored) > 1)
    read_as = torch.float32 if exact else dtype or next(iter(stored))
    target = TargetTensor(name=name, shape=tuple(tensor.shape), dtype=read_as, copies=copies[name])
    tensor.copy_(fill(chunk_at(target, whole(target.shape)), source))


def _restore_wavelengths(model: nn.Module, config: Any) -> None:
    """Compute the buffers that follow from the config and are in no checkpoint: the meta device has no values."""
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            restored = type(module)(config=config)
            for name, buffer in restored.named_buffers(recurse=False):
                setattr(module, name, buffer)


def _in_megatron(found: DistModel, tokens_BS: Tensor) -> list[Tensor]:
    """Run Megatron's model on one rank, with storage for one module at a time; returns as `_in_transformers`."""
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
    if shard.key == SCORE_SHIFT:
        shard.data.zero_()  # the other format has none
        return
    key, there = translation.locate(shard.key, shard.region)
    # Not directly into the shard: a storage that numpy has filled cannot be resized to zero any more.
    read = torch.empty_like(shard.data)
    source.fill(read, key, there)
    shard.data.copy_(read)


def _tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (tensor for tensor in module.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor))


def _storage_id(tensor: Tensor) -> int:
    """Return an id of the tensor's storage; unlike an address, an empty storage has it too."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _outputs_of(
    units: Sequence[nn.Module], enter: Callable[[nn.Module], None], leave: Callable[[nn.Module], None]
) -> Iterator[list[Tensor]]:
    outputs: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)

    def before(module: nn.Module, _: Any) -> None:
        enter(module)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        axis = 0 if tensor.shape[1] == SEQUENCE_LENGTH else 1  # in transformers and in Megatron
        rows = tensor.narrow(axis, NUM_SEQUENCES, tensor.shape[axis] - NUM_SEQUENCES)
        # These sequences are disturbed in the last bit after each layer: how far they stray is what rounding explains.
        up_or_down = torch.randint(0, 2, rows.shape, generator=generator) * 2 - 1
        rows.mul_(1 + torch.finfo(torch.float32).eps * up_or_down)
        outputs.append(tensor.clone())
        leave(module)

    hooks = [unit.register_forward_pre_hook(before) for unit in units]
    hooks += [unit.register_forward_hook(after) for unit in units]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
