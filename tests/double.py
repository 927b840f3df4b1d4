"""Models in fp64, where nothing but a mistake is left: gated delta nets amplify rounding a hundred times.

A head's small outputs are normed before their gate, and small keys are made unit vectors: in fp32 one unit in the last
place of the weights moves gradients of a tiny model by 3e-4.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in, local_shards
from mcore_rl.model.inputs import localize
from mcore_rl.model.layers import experts as experts_grouped
from tests.parallel.parity import Tensors, assembled, config_of, random_weights
from tests.ranks import run_ranks

TORCH = PlatformConfig(layers="torch")


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, casts to fp32 leave doubles alone, in Megatron's code, in transformers' and in ours."""
    real_float, real_to, real_type, real_softmax = Tensor.float, Tensor.to, Tensor.type, torch.softmax

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
            options |= {"dtype": torch.float64} if options.get("dtype") is torch.float32 else {}
        return real_to(tensor, *args, **options)

    def cast(tensor: Tensor, *args: Any, **options: Any) -> Any:
        leaves_alone = tensor.dtype == torch.float64 and args == (torch.float32,)
        return tensor if leaves_alone else real_type(tensor, *args, **options)

    def softmax(tensor: Tensor, dim: Any = None, dtype: Any = None, **_: Any) -> Tensor:
        return real_softmax(tensor, dim, dtype=torch.float64 if tensor.dtype == torch.float64 else dtype)

    with (
        patch.object(experts_grouped, "HAS_GROUPED_MM", False),  # it has no fp64
        patch.object(Tensor, "float", lambda x: x if x.dtype == torch.float64 else real_float(x)),
        patch.object(Tensor, "to", to),
        patch.object(Tensor, "type", cast),
        patch.object(torch, "softmax", softmax),
        patch.object(torch.nn.functional, "softmax", softmax),
    ):
        yield


def doubled(chunk: nn.Module) -> nn.Module:
    """The chunk with weights, routers and angles of positions in fp64."""
    for module in chunk.modules():
        for name in ("inv_freq", "inv_freq_extra", "inv_freq_inter"):
            if name in vars(module):
                setattr(module, name, vars(module)[name].double())
        config: Any = getattr(module, "config", None)
        if hasattr(config, "moe_router_dtype"):
            config.moe_router_dtype, config.params_dtype = "fp64", torch.float64
    return chunk.double()


def three_steps(
    mesh_config: MeshConfig,
    model: ModelConfig,
    weights: dict[str, Tensor],
    ids_BS: Tensor,
    lengths: tuple[int, ...] = (),
) -> tuple[list[Any], list[Any]]:
    """On a rank: the pieces of the gradients of the summed losses of the next tokens, finished as Megatron does, and
    those of the weights after three steps of torch's Adam, for which the tokens move by a position each.
    """
    with in_double():
        platform, mesh = start(TORCH), build_mesh(mesh_config)
        seed_ranks(1)
        chunk = doubled(build_model(model, mesh, platform, TORCH)[0])
        copy_in([chunk], weights)
        params = [param for param in chunk.parameters() if param.requires_grad]
        optimizer = torch.optim.Adam(params, lr=1e-3)
        gradients: list[Any] = []
        for step in range(3):
            optimizer.zero_grad()
            local = localize(_microbatch(ids_BS.roll(step, 1), lengths), mesh.cp, platform.device)
            chunk(**local.model_inputs(with_labels=True)).sum().backward()
            _finish(chunk, mesh)
            gradients = gradients or _pieces_of_gradients(chunk)
            optimizer.step()
        return gradients, _pieces(chunk)


def _microbatch(ids_BS: Tensor, lengths: tuple[int, ...]) -> Microbatch:
    rows, length = ids_BS.shape
    at_BS, spans = torch.arange(length).expand(rows, -1), None
    if lengths:
        at_BS = torch.cat([torch.arange(each) for each in lengths])[None]
        cumulative = torch.tensor((0, *lengths)).cumsum(0).int()
        spans = PackedSpans(cu_seqlens=cumulative, max_length=max(lengths))
    return Microbatch(
        tokens_BS=ids_BS,
        labels_BS=ids_BS.roll(-1, 1),
        position_ids_BS=at_BS,
        packed=spans,
        loss_mask_BS=torch.ones(rows, length),
    )


def _finish(chunk: Any, mesh: Any) -> None:
    for param in chunk.parameters():
        param.main_grad = torch.zeros_like(param) if param.grad is None else param.grad
    chunk.ddp_config = DistributedDataParallelConfig()
    _allreduce_non_tensor_model_parallel_grads([chunk], chunk.config, mesh.tp.group)
    for param in chunk.parameters():
        # Tokens of all tensor- and context-parallel ranks go to the same experts.
        is_expert = not getattr(param, "allreduce", True)
        group = parallel_state.get_expert_data_parallel_group() if is_expert else mesh.cp.group
        torch.distributed.all_reduce(param.main_grad, group=group)
        if param.requires_grad:
            param.grad = param.main_grad


@torch.no_grad()
def _pieces_of_gradients(chunk: Any) -> list[Any]:
    weights = [param.clone() for param in chunk.parameters()]
    for param in chunk.parameters():
        param.copy_(param.main_grad)
    pieces = _pieces(chunk)
    for param, weight in zip(chunk.parameters(), weights, strict=True):
        param.copy_(weight)
    return pieces


def _pieces(chunk: Any) -> list[Any]:
    return [
        (shard.key, shard.where, shard.global_shape, shard.data.detach().clone())
        for shard in local_shards([chunk])
        if shard.is_main and not shard.key.endswith("expert_bias")
    ]


def tokens(lengths: tuple[int, ...]) -> Tensor:
    """Two rows of 64 tokens, or one of packed sequences of these lengths."""
    shape = (1, sum(lengths)) if lengths else (2, 64)
    return torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(2))


@functools.cache
def initial(model: ModelConfig) -> Tensors:
    return random_weights(config_of(model, MeshConfig()))


@functools.cache
def on_one_rank(model: ModelConfig, lengths: tuple[int, ...]) -> list[Tensors]:
    return trained(model, MeshConfig(), lengths)


def trained(model: ModelConfig, mesh: MeshConfig, lengths: tuple[int, ...]) -> list[Tensors]:
    """The gradients of the first step, and the weights after three."""
    ranks = run_ranks(three_steps, mesh.smallest_world, mesh, model, initial(model), tokens(lengths), lengths)
    return [assembled(pieces) for pieces in zip(*ranks, strict=True)]
