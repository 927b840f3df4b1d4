"""Heads that are split, normalized and rotated in one pass are those of float64 and of Megatron's steps."""

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.backend.cpu.compiled import build_id, library
from mcore_rl.backend.cpu.kernels import CpuKernels, using
from mcore_rl.backend.platform import start
from mcore_rl.config.run import PlatformConfig
from mcore_rl.model.build import build_model
from mcore_rl.model.layers.cpu import self_attention
from mcore_rl.model.layers.cpu.self_attention import Angles, HeadNorms, split_heads
from mcore_rl.model.layers.packed import packed_params
from mcore_rl.parallel.mesh import Mesh
from tests.tiny_models import TINY

COMPILED, PYTHON = CpuKernels("mkl", "sdpa", build_id()), CpuKernels("mkl", "sdpa")
FUSED = {"llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}


def normalized(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def turned(heads: Tensor, angles_SH: Tensor) -> Tensor:
    """Heads `[S, B, N, D]` as complex numbers of their two halves, times those of angles `[S, D / 2]`."""
    first, second = heads.chunk(2, -1)
    factors_SH = torch.polar(torch.ones_like(angles_SH), angles_SH)[:, None, None]
    product = torch.complex(first, second) * factors_SH
    return torch.cat([product.real, product.imag], -1)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("rotation", ["none", "by row", "by position"])
@pytest.mark.parametrize(
    ("shape", "width"), [((130, 2, 3, 2), 32), ((9, 1, 1, 1), 64), ((3, 2, 2, 4), 128), ((7, 3, 2, 3), 20)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_are_those_of_float64(
    shape: tuple[int, int, int, int], width: int, rotation: str, has_norms: bool, dtype: torch.dtype
) -> None:
    length, rows, groups, queries = shape
    projection = torch.randn(rows, length, groups, (queries + 2) * width).to(dtype).requires_grad_()
    mixed = projection.transpose(0, 1)  # not contiguous
    weights = [torch.rand(width).add(0.5).to(dtype).requires_grad_() for _ in range(2)] if has_norms else []
    norms = HeadNorms(*weights, 1e-5) if has_norms else None
    positions_S = torch.randint(0, 11, (length,)) if rotation == "by position" else None
    half_AH = torch.rand(11 if positions_S is not None else length, width // 2, dtype=torch.float64) * 6
    both_AD = torch.cat([half_AH, half_AH], -1)
    angles = None
    if rotation != "none":
        angles = Angles(both_AD.cos().float(), both_AD.sin().float(), positions_S)
    found = split_heads(library(), mixed, width, norms, angles)

    split = mixed.double().split([queries * width, width, width], -1)
    exact = [part.reshape(length, rows, -1, width) for part in split]
    for index in range(2):
        if has_norms:
            exact[index] = normalized(exact[index], weights[index], 1e-5)
        if rotation != "none":
            exact[index] = turned(exact[index], half_AH if positions_S is None else half_AH[positions_S])
    # Attention's own layouts: heads before positions, and one gradient for all positions.
    factors = [
        torch.randn(rows, part.shape[2], length, width).to(dtype).permute(2, 0, 1, 3) for part in found
    ]
    factors[2] = torch.randn(1, rows, groups, width).to(dtype).expand(length, -1, -1, -1)
    inputs = [projection, *weights]
    gradients = [
        torch.autograd.grad(parts, inputs, [factor.to(parts[0].dtype) for factor in factors])
        for parts in (found, exact)
    ]
    with torch.no_grad():
        without = split_heads(library(), mixed, width, norms, angles)
    assert all(torch.equal(*pair) for pair in zip(without, found, strict=True))
    # In bf16 the results are rounded once: to their neighbour at most.
    rounding = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    for ours, theirs in zip((*found, *gradients[0]), (*exact, *gradients[1]), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        error = (ours.double() - theirs.double()).abs() - rounding * theirs.double().abs()
        assert error.max() <= 3e-6 * theirs.abs().max()


def loss_and_gradients(chunk: nn.Module, tokens_BS: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Of the mean of squared logits; of a packed row where there are lengths."""
    positions_BS = torch.cat([torch.arange(length) for length in lengths or (tokens_BS.shape[1],)])
    packed = packed_params(lengths, torch.device("cpu")) if lengths else None
    chunk.zero_grad()
    logits = chunk(tokens_BS, positions_BS.expand_as(tokens_BS), None, packed_seq_params=packed)
    logits.square().mean().backward()
    gradients = {name: weight.grad for name, weight in chunk.named_parameters() if weight.grad is not None}
    return [logits.detach(), *[gradient.clone() for gradient in gradients.values()]]


@pytest.mark.parametrize("lengths", [(), (5, 12, 1, 6), (24,)], ids=str)
@pytest.mark.parametrize("family", sorted(TINY))
def test_gradients_of_a_model_are_those_of_megatrons_steps(
    family: str, lengths: tuple[int, ...], one_rank: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass computes what it can, and no other family's layers."""
    platform = PlatformConfig(products="mkl", attention="sdpa")
    chunk = build_model(TINY[family], one_rank, start(platform), platform)[0]
    tokens_BS = torch.randint(0, TINY[family].vocab_size, (1 if lengths else 2, 24))
    calls = []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return split_heads(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(self_attention, "split_heads", counted)
    with using(PYTHON):
        steps = loss_and_gradients(chunk, tokens_BS, lengths)
        assert not calls
    with using(COMPILED):
        at_once = loss_and_gradients(chunk, tokens_BS, lengths)
    assert len(calls) == (TINY[family].num_layers if family in FUSED else 0)
    for ours, theirs in zip(at_once, steps, strict=True):
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
