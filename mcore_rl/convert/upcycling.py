"""Upcycling: turn a dense Hugging Face folder into a mixture of experts that initially computes the same function.

Each expert starts as a copy of the layer's MLP (arXiv 2212.05055), or, with granularity g, as a slice of a copy cut
into g slices (arXiv 2410.07524). The g slices of a copy are neighbouring experts and start with the same router row (a
virtual group), so that a token chooses whole copies. With gates that sum to 1 the result would be 1/g of the MLP's
output; therefore the experts' output matrices are multiplied by g.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checks.model import checked_model_from_hf, divisors
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.convert.copying.conversion import Conversion, CopySettings
from mcore_rl.convert.copying.tensors import OUTPUT_DTYPES, ByteRun, OutputDtype, TargetTensor, tasks_of
from mcore_rl.convert.exporting import DTYPE_KEYS, QUANTIZATION_KEYS, as_json, finish_folder, usual_dtype
from mcore_rl.convert.hf.folder import small_files
from mcore_rl.convert.hf.model import HfModel, HfSource, check_copies, open_hf_model, source_checksums
from mcore_rl.convert.hf.writer import SafetensorsWriter, shards_of
from mcore_rl.errors import ConfigError
from mcore_rl.families import family_named, family_of, weight_map
from mcore_rl.families.config_json import common_to_hf
from mcore_rl.families.weight_map import AxisRange, Copies, Region, RegionCopy, sizes, whole
from mcore_rl.storage.files import sizes_and_times

UPCYCLED = {"llama": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""Dense family -> family of its mixture, which differs only in the MLP."""
SHARED_PART = 0.5
"""Initial share of the MLP's output from a shared expert: the sigmoid of its gate with zero weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleOptions:
    """User options for the mixture made from a dense model."""

    num_experts: int
    top_k: int
    granularity: int = 1
    """Slices that a copy of the MLP is cut into, each of them an expert."""
    shared: int | None = None
    """Number of shared experts per layer; None for the output family's number."""
    noise: float = 0.0
    """Standard deviation of the noise on the experts' weights, as a fraction of the root mean square of their row."""
    router_std: float | None = None
    """Standard deviation of the routers' weights; None for `initializer_range` of config.json."""
    seed: int = 0
    dtype: OutputDtype = "keep"


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor of the output that is not a plain copy."""

    dense: str | None
    """Tensor of the dense model that it is computed from; None for a router."""
    scale: float = 1.0


def plan_upcycle(source: Path, folder: Path, options: UpcycleOptions, settings: CopySettings) -> Conversion:
    """Plan the mixture of a dense Hugging Face folder; CheckpointError or ConfigError if it does not fit."""
    found = open_hf_model(source)
    check_copies(found)
    _check(found.model, options)
    config = _config(found, options)
    model = checked_model_from_hf(config)
    made: dict[str, MadeTensor] = {}
    copies = dict(_mlp_copies(found.model, model, options, made))
    targets = []
    for name, shape in weight_map(model).hf_shapes.items():
        parts = copies.get(name, (RegionCopy(whole(shape), name, whole(shape)),))
        origin = next((made[part.source].dense if part.source in made else part.source for part in parts), None)
        stored = found.dtype(origin or "model.embed_tokens.weight")
        dtype = stored if options.dtype == "keep" else OUTPUT_DTYPES[options.dtype]
        targets.append(TargetTensor(name=name, shape=shape, dtype=dtype, copies=Copies(parts)))
    config |= dict.fromkeys(set(DTYPE_KEYS) & config.keys() or DTYPE_KEYS[:1], usual_dtype(targets))
    shards = shards_of(targets, settings.shard_bytes)
    copied = small_files(source)
    slices = f", each a slice of 1/{options.granularity}" if options.granularity > 1 else ""
    return Conversion(
        title="upcycle",
        final=folder,
        sources=[("the dense model", source)],
        targets=targets,
        tasks=tasks_of(shards, settings.task_bytes),
        open_source=partial(UpcycledSource, found, made, options.router_std or model.init_std, options),
        writer=SafetensorsWriter(shards),
        identity=f"upcycle {options} {model}",
        read=found.folder.stamps | sizes_and_times(copied.values()),
        finish=partial(
            finish_folder,
            copied,
            {"config.json": as_json(config)},
            {"kind": "upcycle", "family": model.family, "options": asdict(options)},
            partial(source_checksums, found.folder),
        ),
        notes=[
            f"{found.model.family} -> {model.family}: {options.num_experts} experts a layer, top {options.top_k}"
            f"{slices}, {'one shared expert, ' if model.moe.shared_experts else ''}noise {options.noise:g}"
        ],
    )


class UpcycledSource(HfSource):
    """The tensors of a dense model, and the tensors made from them: scaled slices with noise, and routers."""

    def __init__(
        self, found: HfModel, made: Mapping[str, MadeTensor], router_std: float, options: UpcycleOptions
    ) -> None:
        """`made` describes, by name, each tensor that is not a copy of a dense tensor."""
        super().__init__(found.folder, found.fp8_block)
        self._made = made
        self._router_std, self._options = router_std, options

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a region to `out` (see TensorSource); for a made tensor, `where` is a region of the dense tensor."""
        part = self._made.get(name)
        if part is None:
            super().fill(out, name, where)
            return
        if part.dense is None:
            # A router in float32: a random row for each copy of the MLP, the same for all its slices.
            shape = self._options.num_experts // self._options.granularity, where[1].stop
            router_ED = self._router_std * torch.randn(shape, generator=self._generator(name))
            router_ED = router_ED.repeat_interleave(self._options.granularity, 0)
            out.copy_(router_ED[slice(*where[0])].view(out.shape))
            return
        values_RC = torch.empty(sizes(where))
        super().fill(values_RC, part.dense, where)
        values_RC *= part.scale
        if self._options.noise:
            # Chunks begin at the same rows in every run, for any number of workers.
            noise_RC = torch.randn(values_RC.shape, generator=self._generator(f"{name} {where[0].start}"))
            values_RC += self._options.noise * values_RC.square().mean(1, keepdim=True).sqrt() * noise_RC
        out.copy_(values_RC.view(out.shape))

    def prefetch(self, name: str, where: Region) -> None:
        dense = self._made[name].dense if name in self._made else name
        if dense is not None:
            super().prefetch(dense, where)

    def run(self, name: str, where: Region) -> ByteRun | None:
        return None if name in self._made else super().run(name, where)

    def _generator(self, name: str) -> torch.Generator:
        digest = sha256(f"{self._options.seed} {name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _check(dense: ModelConfig, options: UpcycleOptions) -> None:
    pairs = ", ".join(f"{old} -> {new}" for old, new in UPCYCLED.items())
    if dense.is_moe:
        raise ConfigError(
            f"the source has {dense.moe.num_experts} experts a layer already ({dense.family}): only a dense model is "
            f"upcycled ({pairs})."
        )
    if dense.family not in UPCYCLED:
        raise ConfigError(
            f"the source is of the family {dense.family}, of which no mixture is known. Known are {pairs}."
        )
    if dense.head == "score":
        raise ConfigError("the source has a score instead of logits. Upcycle the language model that it was made of.")
    count, top_k, granularity = options.num_experts, options.top_k, options.granularity
    if top_k > count:
        raise ConfigError(f"--top-k {top_k} is more than --experts {count}. Choose at most {count}.")
    if granularity & (granularity - 1):
        raise ConfigError(
            f"--granularity {granularity} is no power of two: weights are multiplied by it, which is exact only then. "
            "Choose 1, 2, 4 or 8."
        )
    for name, value in (("--experts", count), ("--top-k", top_k)):
        if value % granularity:
            raise ConfigError(
                f"{name} {value} is not a multiple of --granularity {granularity}: the slices of a copy of the MLP are "
                f"chosen together. Choose a multiple, such as {name} {granularity * max(1, value // granularity)}."
            )
    if dense.ffn_hidden_size % granularity:
        raise ConfigError(
            f"--granularity {granularity} does not divide the width of the MLP, {dense.ffn_hidden_size}. Choose a "
            f"power of two among {divisors(dense.ffn_hidden_size)}."
        )
    family = UPCYCLED[dense.family]
    has_shared = family_named(family).has_shared_expert_gate
    if options.shared not in (None, int(has_shared)):
        raise ConfigError(
            f"--shared {options.shared}: a layer of {family} has {'one shared expert' if has_shared else 'none'}. "
            "Leave it out."
        )
    if options.noise < 0 or (options.router_std is not None and options.router_std <= 0):
        raise ConfigError(
            f"--noise {options.noise:g} and --router-std {options.router_std} are standard deviations: the first is at "
            "least 0, the second above."
        )


def _config(found: HfModel, options: UpcycleOptions) -> dict[str, Any]:
    dense = found.model
    family = family_named(UPCYCLED[dense.family])
    has_shared = family.has_shared_expert_gate
    experts = MoEConfig(
        num_experts=options.num_experts,
        top_k=options.top_k,
        ffn_hidden_size=dense.ffn_hidden_size // options.granularity,
        shared_experts=int(has_shared),
        shared_ffn_hidden_size=dense.ffn_hidden_size if has_shared else "auto",
    )
    model = dense.model_copy(update={"family": family.model_type, "moe": experts})
    known = dict(found.folder.config or {})
    for name in (*QUANTIZATION_KEYS, "mlp_bias", "pretraining_tp"):
        known.pop(name, None)
    # Where a key is absent, the two families may have other defaults, as of rope_theta and head_dim.
    known |= {name: value for name, value in common_to_hf(dense).items() if known.get(name) is None}
    return known | {"architectures": [family.hf_class], "model_type": family.model_type} | family.to_hf(model)


def _mlp_copies(
    dense: ModelConfig, model: ModelConfig, options: UpcycleOptions, made: dict[str, MadeTensor]
) -> Iterator[tuple[str, tuple[RegionCopy, ...]]]:
    family, hidden, width = family_of(model), dense.hidden_size, dense.ffn_hidden_size
    names, sliced = family.moe_names, width // options.granularity
    has_shared = family.has_shared_expert_gate
    scale = options.granularity * (1 - SHARED_PART if has_shared else 1.0)

    def slice_of(name: str, origin: str, where: Region, factor: float) -> tuple[str, tuple[RegionCopy, ...]]:
        source = origin
        if factor != 1 or options.noise:
            made[name], source = MadeTensor(origin, factor), name
        return name, (RegionCopy(whole(sizes(where)), source, where),)

    for i in range(dense.num_layers):
        mlp, layer = f"model.layers.{i}.mlp.", f"model.layers.{i}.{names.prefix}"
        router = f"{layer}gate.weight"
        made[router] = MadeTensor(None)
        where = whole((options.num_experts, hidden))
        yield router, (RegionCopy(where, router, where),)
        rows, columns = whole((width, hidden)), whole((hidden, width))
        for e in range(options.num_experts):
            first = e % options.granularity * sliced
            part = AxisRange(first, first + sliced)
            expert = f"{layer}experts.{e}."
            for ours, theirs in ((names.gate, "gate_proj"), (names.up, "up_proj")):
                yield slice_of(f"{expert}{ours}.weight", f"{mlp}{theirs}.weight", (part, rows[1]), 1.0)
            down = f"{mlp}down_proj.weight"
            yield slice_of(f"{expert}{names.down}.weight", down, (columns[0], part), scale)
        if has_shared:
            for kind, region in (("gate_proj", rows), ("up_proj", rows), ("down_proj", columns)):
                yield (f"{layer}{names.shared}.{kind}.weight", (RegionCopy(region, f"{mlp}{kind}.weight", region),))
            yield f"{layer}{names.shared_gate}.weight", ()  # zeros
