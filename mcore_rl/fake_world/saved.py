"""Bytes of activations that a layer of ours keeps for its backward pass: the tensors saved in a real forward pass.

The bytes of a layer are the difference between two layers and a single layer. It has its true widths and as many
experts as a token picks, so that weights are few and loads even; collectives move nothing, and matrix products are
zeros, as nobody reads them. Its operations are the same as on a GPU except for the norm, which torch fuses on GPUs only
and which is replaced. TransformerEngine's layers need a GPU, and are not counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.fake_world.groups import fake_platform, fake_rank
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_uninitialized
from mcore_rl.planning.activations import LayerActivations
from mcore_rl.planning.exact import LayerSaved

POSITIONS = 64
"""Positions of the counted microbatch on each tensor-parallel rank."""
VOCABULARY = 256


def saved_by_layers(
    mesh: MeshConfig, model: ModelConfig, platform: PlatformConfig, lora: LoraConfig
) -> list[LayerSaved]:
    """Return the bytes that each kind of layer of a run's model keeps, with the run's recomputation and adapters."""
    kinds = sorted(set(model.layer_kinds))
    return [saved_by_layer(layer_model(model, kind), platform, mesh.tp, lora) for kind in kinds]


def saved_by_layer(
    model: ModelConfig, settings: PlatformConfig, tp: int, lora: LoraConfig | None = None
) -> LayerSaved:
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
        few_experts = {
            "num_experts": moe.top_k,
            "num_groups": None,
            "top_groups": None,
            "capacity_factor": None,
        }
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
