"""Attention of packed sequences on an emulated GPU, whose kernel for them tests/emulated_gpu.py stands in for."""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType

from mcore_rl.backend import platform
from mcore_rl.backend.varlen import kernel_found
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.model.layers.attention import SDPAttention
from mcore_rl.model.layers.packed import packed_params
from mcore_rl.parallel.mesh import build_mesh, layer_groups, seed_ranks
from mcore_rl.run import doctor
from tests.emulated_gpu import GPU, HOST, active, counted_syncs
from tests.unit.model.layers import oracles
from tests.unit.model.layers.oracles import small_config

LENGTHS = (5, 1, 12, 22)
CASES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "values narrower than keys": {"value_width": 4},
    "a window": {"window_size": (6, 0)},
    "sinks": {"softmax_type": "learnable"},
    "heads of a width that kernels do not have": {"width": 6},
    "fp32": {"dtype": torch.float32},
}


def attention() -> dict[str, Any]:
    """For each case how many calls the kernel got, and how far output and gradients are from the closed form."""
    gpu = active()
    assert gpu is not None
    started = platform.start(PlatformConfig(precision="bf16"))
    build_mesh(MeshConfig())
    seed_ranks(1)
    kernel = kernel_found()
    found = {name: compared(**changes) for name, changes in CASES.items()}
    rotation = rotation_difference()
    platform.stop()
    return {
        "rotation_difference": rotation,
        "kernel": kernel.name if kernel else None,
        "log": started.describe(),
        "doctor": doctor.kernels(),
        "cases": found,
    }


def compared(
    width: int = 8, value_width: int | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> dict[str, Any]:
    """Compare one layer."""
    gpu = active()
    assert gpu is not None
    generator = torch.Generator().manual_seed(4)
    shapes = ((4, width), (2, width), (2, value_width or width))
    # What bf16 holds exactly, so that the closed form in float64 has the same inputs.
    inputs = [
        torch.randn(sum(LENGTHS), *shape, generator=generator).bfloat16().float().requires_grad_()
        for shape in shapes
    ]
    config = small_config(kv_channels=width, params_dtype=dtype, **changes)
    layer = SDPAttention(config, 1, AttnMaskType.causal, "self")
    packed = packed_params(LENGTHS, GPU)
    gpu.packed_calls = 0
    with counted_syncs() as syncs:
        placed = [heads.detach().to(GPU, dtype).requires_grad_() for heads in inputs]
        mixed = layer(*placed, None, packed_seq_params=packed)
        waits = dict(syncs)
    actual = mixed.detach().to(HOST).double()
    sinks = None if layer.softmax_offset is None else layer.softmax_offset.detach().to(HOST)
    window = config.window_size[0] if config.window_size else None
    parts = [
        oracles.attention(
            *(heads[:, None] for heads in part),
            oracles.causal(len(part[0]), len(part[0]), window),
            width**-0.5,
            sinks,
        )[:, 0]
        for part in zip(*(heads.split(LENGTHS) for heads in inputs), strict=True)
    ]
    expected = torch.cat(parts).flatten(1)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64).bfloat16().double()
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    grads = torch.autograd.grad(mixed, placed, weights.to(GPU, dtype))
    return {
        "calls": gpu.packed_calls,
        "waits": waits,
        "differences": [
            float((a.detach().to(HOST).double() - b.detach().double()).abs().max())
            for a, b in [(actual, expected), *zip(grads, wanted, strict=True)]
        ],
    }


def rotation_difference() -> float:
    """How far a packed row that the emulated GPU rotates at once is from its sequences rotated by themselves."""
    groups = layer_groups("cp")
    heads_TND = torch.randn(sum(LENGTHS), 3, 8, generator=torch.Generator().manual_seed(6))
    angles = torch.randn(max(LENGTHS), 1, 1, 8, generator=torch.Generator().manual_seed(7))
    bounds = packed_params(LENGTHS, GPU).cu_seqlens_q
    with counted_syncs() as syncs:
        whole = rope_utils._apply_rotary_pos_emb_thd(
            heads_TND.to(GPU), bounds, angles.to(GPU), cp_group=groups.cp
        )
        assert not syncs, dict(syncs)
    parts = [
        rope_utils._apply_rotary_pos_emb_bshd(part[:, None], angles[: len(part)])[:, 0]
        for part in heads_TND.split(LENGTHS)
    ]
    return float((whole.to(HOST) - torch.cat(parts)).abs().max())
