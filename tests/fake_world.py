"""A rank of any world, without the rest of the world and without GPUs: its groups, its bytes, its activations.

Groups and shapes are right, and values are garbage, because collectives do nothing. A process is a single rank at a
time, so that tests call these functions by `tests.ranks.run_ranks`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, Mixer, ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.speed import planned_flags
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import Platform, stop
from mcore_rl.megatron.routers import routers
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_model, build_uninitialized
from mcore_rl.planning.activations import LayerActivations
from mcore_rl.planning.memory import FP8_COPIES_BYTES, Memory
from mcore_rl.planning.training import ModelOnRanks, Training
from mcore_rl.train.optimizer import build_optimizer, initialize_moments
from mcore_rl.train.setup import freeze, wrap_for_data_parallelism


@contextmanager
def fake_rank(config: MeshConfig, rank: int, world_size: int) -> Iterator[Mesh]:
    """Leave the process group, and act as `rank` of a mesh on `world_size` ranks: collectives do not wait or move data.

    Torch's groups belong to the process, so that a process is a single rank at a time.
    """
    stop()
    functions: Any = dist  # Megatron and torch look these up by name
    new_group, gather, barrier, show_error = dist.new_group, dist.all_gather_object, dist.barrier, sys.excepthook

    def new_fake_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        # Megatron asks for gloo groups by name, which the fake store cannot make.
        return new_group(ranks, **options | {"backend": "fake"})

    def gather_own(object_list: list[Any], obj: Any, group: Any = None) -> None:
        # Ranks exchange the kinds of their parameters; other ranks' kinds would only name groups that are empty on this
        # rank.
        object_list[:] = [obj] * len(object_list)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    functions.new_group, functions.all_gather_object = new_fake_group, gather_own
    functions.barrier = lambda **_: SimpleNamespace(is_completed=lambda: True, wait=lambda: None)  # nobody else comes
    try:
        with _without_other_groups(rank):
            mesh = build_mesh(config)
        seed_ranks(1)
        yield mesh
    finally:
        destroy_mesh()
        functions.new_group, functions.all_gather_object, functions.barrier = new_group, gather, barrier
        dist.destroy_process_group()
        # Every start of a group puts its rank before all later tracebacks.
        sys.excepthook = show_error


@contextmanager
def _without_other_groups(rank: int) -> Iterator[None]:
    """Let `build_mesh` make only the groups of `rank`, in a world that does not exist; a large world has thousands."""
    functions: Any = parallel_state  # Megatron looks these up by name
    create_group, list_groups = (parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups)

    def create_own_group(ranks: Sequence[int], *args: Any, **options: Any) -> Any:
        is_other = rank not in ranks
        return dist.GroupMember.NON_GROUP_MEMBER if is_other else create_group(ranks, *args, **options)

    def listed(world_size: int, sizes: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
        groups: list[list[int]] = _listed_groups(world_size, tuple(sizes), tuple(mask))
        return groups

    functions.create_group, functions.generate_masked_orthogonal_rank_groups = create_own_group, listed
    try:
        yield
    finally:
        functions.create_group, functions.generate_masked_orthogonal_rank_groups = create_group, list_groups


_listed_groups = cache(parallel_state.generate_masked_orthogonal_rank_groups)
"""Megatron's lists of all groups of a kind, which every rank of a world lists again."""


def fake_platform(settings: PlatformConfig, mesh: Mesh) -> Platform:
    """Return the platform of a fake rank, which computes on the CPU with our layers whatever `settings` says."""
    return Platform(
        device=torch.device("cpu"),
        dtype=torch.bfloat16 if settings.precision == "bf16" else torch.float32,
        layers="torch",
        rank=mesh.world.rank,
        local_rank=0,
        world_size=mesh.world.size,
        deterministic=False,
    )


META = torch.device("meta")


@contextmanager
def on_meta() -> Iterator[None]:
    """Put every new tensor on `meta`, whatever device it is asked for."""
    with _OnMeta():
        yield


class _OnMeta(TorchFunctionMode):
    """Put tensors on `meta` even for factories that are given a device, as Megatron's are: the context of
    `torch.device("meta")` leaves those alone.

    FakeTensorMode would do as well, but cannot exchange the data of a parameter, as the cast to 16 bits does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factories: frozenset[Any] = frozenset(_device_constructors())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with its device replaced."""
        named = dict(kwargs or {})
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return args[0]
        if func in self.factories or "device" in named:
            named["device"] = META
        elif func is torch.Tensor.to:
            args = tuple(META if isinstance(argument, torch.device) else argument for argument in args)
        result = func(*args, **named)
        if isinstance(result, str) and getattr(func, "__name__", "") == "type":
            # The distributed optimizer knows kinds of tensors by these names.
            return result.replace(".meta.", ".")
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes on one rank, counted."""

    rank: int
    stage: int
    weights: int
    """Bytes of weights and of buffers such as the routers', on the device, with the gaps between them."""
    gradients: int
    """Bytes of gradients, with the gaps between them."""
    optimizer: int
    """Bytes of the rank's share of the optimizer state."""
    gaps: int
    """Number of weights that would fill the gaps that DDP leaves so that ranks have equal shares."""
    gradient_gaps: int
    """Bytes of the gaps in the gradients."""
    numbers: int
    """Number of weights on the device."""
    host: int
    """Bytes of weights and optimizer states that wait in main memory."""
    host_optimizer: int
    """Bytes of main memory of offloaded optimizer states, and of the gradients that the processor reads."""

    def excess(self, planned: Memory, platform: PlatformConfig) -> dict[str, int]:
        """Return the bytes by which the closed form exceeds the counts, by part; it does not include gaps."""
        element = 2 if platform.precision == "bf16" else 4
        # TransformerEngine's 8-bit copies are not among the modules' weights.
        copies = FP8_COPIES_BYTES * self.numbers if platform.fp8 != "none" else 0
        return {
            "weights": planned.weights - copies - (self.weights - self.gaps * element),
            "gradients": planned.gradients - (self.gradients - self.gradient_gaps),
            "optimizer": planned.optimizer - self.optimizer,
            "main memory": planned.host + planned.host_optimizer - self.host - self.host_optimizer,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSaved:
    """Bytes of the activations that a layer keeps of some tokens."""

    is_moe: bool
    mixer: Mixer
    tokens: int
    """Number of tokens before tensor parallelism cuts them."""
    counted: int
    planned: int
    """Bytes by the closed form of the same layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """Bytes of a model on a rank."""

    one: ModelOnRanks
    numbers: int
    """Number of weights."""
    weights: int
    gradients: int = 0
    optimizer: int = 0
    host_optimizer: int = 0
    gaps: int = 0
    gradient_gaps: int = 0


def bytes_of_rank(training: Training, rank: int, updated: str | None = None) -> RankBytes:
    """Build every model of a training on a rank, on `meta`, and count its bytes.

    Layers are ours whatever the config says: TransformerEngine's have the same weights.

    Args:
        training: The training.
        rank: The rank.
        updated: Name of the model that is being updated when the bytes are counted; it matters if models wait elsewhere
            between their updates. None for the first that is trained.
    """
    with fake_rank(training.mesh, rank, training.world_size) as mesh, on_meta():
        counted = [_model_bytes(training, model, mesh) for model in training.models]
        stage = mesh.pp.rank
    trained = [each for each in counted if each.one.trains]
    present = [each for each in trained if updated in (None, each.one.name)][:1]
    resident = [each for each in trained if each in present or each.one.store == "device"]
    with_weights = [each for each in counted if each in present or each.one.has_weights]
    return RankBytes(
        rank=rank,
        stage=stage,
        weights=sum(each.weights for each in with_weights),
        gradients=sum(each.gradients for each in resident),
        optimizer=sum(each.optimizer for each in resident),
        gaps=sum(each.gaps for each in with_weights),
        gradient_gaps=sum(each.gradient_gaps for each in resident),
        numbers=sum(each.numbers for each in with_weights),
        host=sum(
            each.optimizer + (0 if each.one.weights_stay else each.weights) for each in counted if each.one.on_host
        ),
        host_optimizer=sum(each.host_optimizer for each in counted),
    )


def _model_bytes(training: Training, one: ModelOnRanks, mesh: Mesh) -> ModelBytes:
    """Return the bytes of a model on the rank of `mesh`."""
    platform, trains_mtp = fake_platform(training.platform, mesh), training.rollouts is None
    bare = build_model(buildable(one.model), mesh, platform, training.platform)
    if one.lora.is_on:
        add_adapters(bare, one.lora, one.model, seed=0)
    for chunk in bare:
        for _, router in routers(chunk):
            # As the first forward pass does.
            router._maintain_float32_expert_bias()
    weights = storage_bytes(tensor for chunk in bare for tensor in (*chunk.parameters(), *chunk.buffers()))
    numbers = sum(param.numel() for chunk in bare for param in chunk.parameters())
    if one.optim is None:
        if one.is_swapped and one.lora.is_on:
            held = [param for chunk in bare for param in chunk.parameters() if param.requires_grad]
            numbers, weights = sum(param.numel() for param in held), storage_bytes(held)
        return ModelBytes(one=one, numbers=numbers, weights=weights)
    freeze(bare, trains_routers=not training.freezes_router, trains_mtp=trains_mtp)
    flags = planned_flags(training.platform, training.mesh, training.model, training.world_size, trains_mtp=trains_mtp)
    chunks = wrap_for_data_parallelism(bare, flags, mesh, one.optim)
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gaps = [buffer.numel - sum(param.numel() for param in buffer.params) for buffer in buffers]
    optimizer = build_optimizer(one.optim, platform, chunks)
    initialize_moments(optimizer)
    on_host = storage_bytes(_offloaded(optimizer))
    return ModelBytes(
        one=one,
        numbers=numbers,
        # Parameters are now in buffers with gaps between them, which the optimizer gathers as a whole.
        weights=storage_bytes(tensor for chunk in bare for tensor in (*chunk.parameters(), *chunk.buffers())),
        gradients=storage_bytes(buffer.grad_data for buffer in buffers),
        optimizer=storage_bytes(_states(optimizer)) - on_host,
        host_optimizer=on_host + _offloaded_gradients(optimizer),
        gaps=sum(gaps),
        gradient_gaps=sum(count * buffer.grad_data.element_size() for count, buffer in zip(gaps, buffers, strict=True)),
    )


def _states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield moments and fp32 copies of this rank's share of the weights, in whichever memory."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            # In a hybrid optimizer each weight has a count of steps.
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
        # Of the distributed optimizer, of another for bf16, or of none.
        copies = getattr(part, "shard_fp32_from_float16_groups", getattr(part, "fp32_from_float16_groups", ()))
        for group in copies:
            yield from (copy for copy in group if copy is not None)


def _hybrid(optimizer: MegatronOptimizer) -> Iterator[HybridDeviceOptimizer]:
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield part.optimizer


def _offloaded(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield moments and fp32 copies that Megatron's hybrid optimizer has in main memory."""
    for hybrid in _hybrid(optimizer):
        for weight, copy in hybrid.gpu_params_map_cpu_copy.items():
            yield copy
            yield from (value for value in hybrid.state[weight].values() if isinstance(value, Tensor) and value.dim())


def _offloaded_gradients(optimizer: MegatronOptimizer) -> int:
    """Return the bytes of the gradients in main memory; the first step makes them as large as the fp32 copies."""
    return sum(
        copy.numel() * copy.element_size()
        for hybrid in _hybrid(optimizer)
        for copy in hybrid.gpu_params_map_cpu_copy.values()
    )


def buildable(model: ModelConfig) -> ModelConfig:
    """Return a model with the same weights that needs no packages for GPUs."""
    if not model.is_moe:
        return model
    return model.model_copy(update={"moe": model.moe.model_copy(update={"dispatcher": "alltoall"})})


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory that tensors use, counting shared memory once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


POSITIONS = 64
"""Positions of the counted microbatch on each tensor-parallel rank."""
VOCABULARY = 256


def saved_by_layers(
    mesh: MeshConfig, model: ModelConfig, platform: PlatformConfig, lora: LoraConfig
) -> list[LayerSaved]:
    """Return the bytes that each kind of layer of a run's model keeps, with the run's recomputation and adapters."""
    kinds = sorted(set(model.layer_kinds))
    return [saved_by_layer(layer_model(model, kind), platform, mesh.tp, lora) for kind in kinds]


def saved_by_layer(model: ModelConfig, settings: PlatformConfig, tp: int, lora: LoraConfig | None = None) -> LayerSaved:
    """Return the bytes that a layer of `model` like its last layer keeps on each of `tp` tensor-parallel ranks."""
    tokens, kind = POSITIONS * tp, model.layer_kinds[-1]
    # Apart from its layers, the platform may be one for GPUs.
    settings = settings.model_copy(update={"layers": "torch", "fp8": "none"})
    with _norm_of_gpus():
        one, two = (_storages(_with_layers(model, count), settings, tp, tokens, lora) for count in (1, 2))
    counted = sum(size * count for size, count in (two - one).items())
    counted -= sum(size * count for size, count in (one - two).items())
    layer = LayerActivations(model, MeshConfig(tp=tp), settings, tokens, "torch")
    is_full = settings.recompute == "full"
    return LayerSaved(
        is_moe=kind.is_moe,
        mixer=kind.mixer,
        tokens=tokens,
        counted=counted,
        planned=layer.residual if is_full else layer.kept(kind),
    )


def layer_model(model: ModelConfig, kind: LayerKind) -> ModelConfig:
    """Return a model of one kind of `model`'s layers, with as many experts as a token picks and few other weights."""
    moe = model.moe
    if model.is_moe:
        few_experts = {"num_experts": moe.top_k, "num_groups": None, "top_groups": None, "capacity_factor": None}
        moe = moe.model_copy(
            update={**few_experts, "dispatcher": "alltoall", "first_dense_layers": 0 if kind.is_moe else 2}
        )
    few = {"num_layers": 2, "mtp_layers": 0, "vocab_size": VOCABULARY, "vocab_multiple": 1, "head": "logits"}
    # Two layers have no third, so that both are delta nets.
    delta = model.delta.model_copy(update={"full_every": 3 if kind.mixer == "delta" else None})
    # Before a layer that shares a choice is one that makes it.
    indexer = model.indexer.model_copy(update={"shared_layers": (1,) if kind.mixer == "shared" else ()})
    return model.model_copy(update=few | {"moe": moe, "delta": delta, "indexer": indexer})


def _with_layers(model: ModelConfig, count: int) -> ModelConfig:
    """Return a model with this number of layers of a single kind."""
    dense = count if model.is_moe and not model.moe_layers[0] else 0
    moe = model.moe.model_copy(update={"first_dense_layers": dense})
    return model.model_copy(update={"num_layers": count, "moe": moe})


def _storages(
    model: ModelConfig, settings: PlatformConfig, tp: int, tokens: int, lora: LoraConfig | None
) -> Counter[int]:
    """Return the sizes of the storages that autograd keeps after a forward pass and that belong to no weight."""
    with fake_rank(MeshConfig(tp=tp), 0, tp) as mesh:
        # Memory that was never written takes no space, and reads as zeros.
        chunk = build_uninitialized(model, mesh, fake_platform(settings, mesh), settings)
        if lora and lora.is_on:
            add_adapters([chunk], lora, model, seed=0)
        weights = {tensor.untyped_storage()._cdata for tensor in (*chunk.parameters(), *chunk.buffers())}
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        products: Any = _WithoutProducts  # torch's modes are not typed
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), products():
            tokens_BS = torch.randint(0, VOCABULARY, (1, tokens))
            output = chunk(input_ids=tokens_BS, position_ids=torch.arange(tokens)[None], attention_mask=None)
        # After the forward pass: what recomputation frees has a storage of 0 bytes by then.
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
        del output
    return Counter(size for storage, size in found.items() if storage not in weights)


class _WithoutProducts(TorchDispatchMode):
    """Make matrix products zeros: at true widths a layer's products take seconds and read gigabytes of weights."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or leave its arithmetic out."""
        named = dict(kwargs or {})
        if func not in PRODUCTS:
            return func(*args, **named)
        left, right = args[-2:] if func is torch.ops.aten.addmm.default else args[:2]
        dtype = named.get("out_dtype") or left.dtype
        return left.new_zeros((*left.shape[:-1], right.shape[-1]), dtype=dtype)


PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
    }
)


class _FusedNorm(torch.autograd.Function):
    """A norm that keeps the same as torch's kernel for GPUs: its input and a number a row. It has no gradient."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(input)


@contextmanager
def _norm_of_gpus() -> Iterator[None]:
    """Let `rms_norm` keep the same as on a GPU; on a CPU torch makes it of a dozen operations."""
    norm = torch.nn.functional.rms_norm

    def fused(input: torch.Tensor, _: Any, weight: torch.Tensor, __: float) -> torch.Tensor:
        output: torch.Tensor = _FusedNorm.apply(input, weight)  # type: ignore[no-untyped-call]
        return output

    torch.nn.functional.rms_norm = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.rms_norm = norm
