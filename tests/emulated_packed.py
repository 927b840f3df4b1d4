"""Attention of packed sequences on an emulated GPU, whose kernel for them tests/emulated_varlen.py stands in for."""

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType

from mcore_rl.cli import doctor
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import build_mesh, layer_groups, seed_ranks
from mcore_rl.model.layers.attention import SDPAttention, gathered_order, packed_params
from tests.emulated_gpu import GPU, HOST, active, counted_syncs
from tests.unit.model.layers import oracles
from tests.unit.model.layers.oracles import small_config

LENGTHS = (5, 1, 12, 22)
CASES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "values narrower than keys": {"value_width": 4},
    "a window": {"window_size": (6, 0)},
    "sinks": {"softmax_type": "learnable"},
    "sinks and a window": {"softmax_type": "learnable", "window_size": (6, 0)},
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
    found = {name: compared(**changes) for name, changes in CASES.items()}
    rotation = rotation_difference()
    platform.stop()
    return {"rotation_difference": rotation, "log": started.describe(), "doctor": doctor.kernels(), "cases": found}


def compared(
    width: int = 8, value_width: int | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> dict[str, Any]:
    """Compare one layer, on each context-parallel rank its part."""
    gpu = active()
    assert gpu is not None
    cp = layer_groups("cp").cp
    lengths, order = LENGTHS, torch.arange(sum(LENGTHS))
    if cp.size() > 1:
        lengths = tuple(2 * cp.size() * length for length in LENGTHS)
        order = gathered_order(lengths, cp.size()).argsort().chunk(cp.size())[cp.rank()]
    generator = torch.Generator().manual_seed(4)
    shapes = ((4, width), (2, width), (2, value_width or width))
    # What bf16 holds exactly, so that the closed form in float64 has the same inputs.
    inputs = [
        torch.randn(sum(lengths), *shape, generator=generator).bfloat16().float().requires_grad_() for shape in shapes
    ]
    ranks = {"context_parallel_size": cp.size()}
    config = small_config(kv_channels=width, params_dtype=dtype, **changes, **ranks)
    layer = SDPAttention(config, 1, AttnMaskType.causal, "self")
    packed = packed_params(lengths, GPU)
    gpu.packed_calls = 0
    with counted_syncs() as syncs:
        placed = [heads.detach()[order].to(GPU, dtype).requires_grad_() for heads in inputs]
        mixed = layer(*placed, None, packed_seq_params=packed)
        waits = dict(syncs)
    actual = mixed.detach().to(HOST).double()
    sinks = None if layer.softmax_offset is None else layer.softmax_offset.detach().to(HOST).double()
    window = config.window_size[0] if config.window_size else None
    parts = [
        oracles.attention(
            *(heads[:, None] for heads in part),
            oracles.causal(len(part[0]), len(part[0]), window),
            width**-0.5,
            None if sinks is None else sinks.requires_grad_(),
        )[:, 0]
        for part in zip(*(heads.split(lengths) for heads in inputs), strict=True)
    ]
    expected = torch.cat(parts).flatten(1)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64).bfloat16().double()
    wanted = torch.autograd.grad((expected * weights).sum(), [*inputs, *([] if sinks is None else [sinks])])
    of_layer = [] if layer.softmax_offset is None else [layer.softmax_offset]
    found = torch.autograd.grad(mixed, [*placed, *of_layer], weights[order].to(GPU, dtype))
    pairs = [(actual, expected[order]), *((a, b[order]) for a, b in zip(found[:3], wanted, strict=False))]
    if of_layer:
        # A rank has the part of its queries.
        of_sinks = found[3].detach().to(HOST).double()
        torch.distributed.all_reduce(of_sinks, group=cp)
        pairs.append((of_sinks, wanted[3]))
    return {
        "calls": gpu.packed_calls,
        "waits": waits,
        "differences": [float((a.detach().to(HOST).double() - b.detach().double()).abs().max()) for a, b in pairs],
    }


def context_parallel(folder: str) -> None:
    """Each case on two context-parallel ranks; each writes what it found."""
    started = platform.start(PlatformConfig(precision="bf16"))
    build_mesh(MeshConfig(cp=2))
    seed_ranks(1)
    found = {name: compared(**changes) for name, changes in CASES.items()}
    Path(folder, str(started.rank)).write_text(json.dumps(found))
    platform.stop()


def rotation_difference() -> float:
    """How far a packed row that the emulated GPU rotates at once is from its sequences rotated by themselves."""
    groups = layer_groups("cp")
    heads_TND = torch.randn(sum(LENGTHS), 3, 8, generator=torch.Generator().manual_seed(6))
    angles = torch.randn(max(LENGTHS), 1, 1, 8, generator=torch.Generator().manual_seed(7))
    bounds = packed_params(LENGTHS, GPU).cu_seqlens_q
    with counted_syncs() as syncs:
        whole = rope_utils._apply_rotary_pos_emb_thd(heads_TND.to(GPU), bounds, angles.to(GPU), cp_group=groups.cp)
        assert not syncs, dict(syncs)
    parts = [
        rope_utils._apply_rotary_pos_emb_bshd(part[:, None], angles[: len(part)])[:, 0]
        for part in heads_TND.split(LENGTHS)
    ]
    return float((whole.to(HOST) - torch.cat(parts)).abs().max())
