"""Heads that are split, normalized and rotated in one pass are those of float64."""

import pytest
import torch
from torch import Tensor

from mcore_rl.model.layers.cpu.self_attention import Angles, HeadNorms, split_heads


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
def test_heads_are_those_of_float64(
    shape: tuple[int, int, int, int], width: int, rotation: str, has_norms: bool
) -> None:
    length, rows, groups, queries = shape
    projection = torch.randn(rows, length, groups, (queries + 2) * width).requires_grad_()
    mixed = projection.transpose(0, 1)  # not contiguous
    weights = [torch.rand(width).add(0.5).requires_grad_() for _ in range(2)] if has_norms else []
    norms = HeadNorms(*weights, 1e-5) if has_norms else None
    positions_S = torch.randint(0, 11, (length,)) if rotation == "by position" else None
    half_AH = torch.rand(11 if positions_S is not None else length, width // 2, dtype=torch.float64) * 6
    both_AD = torch.cat([half_AH, half_AH], -1)
    angles = None
    if rotation != "none":
        angles = Angles(both_AD.cos().float(), both_AD.sin().float(), positions_S)
    found = split_heads(mixed, width, norms, angles)

    split = mixed.double().split([queries * width, width, width], -1)
    exact = [part.reshape(length, rows, -1, width) for part in split]
    for index in range(2):
        if has_norms:
            exact[index] = normalized(exact[index], weights[index], 1e-5)
        if rotation != "none":
            exact[index] = turned(exact[index], half_AH if positions_S is None else half_AH[positions_S])
    # Attention's own layouts: heads before positions, and one gradient for all positions.
    factors = [torch.randn(rows, part.shape[2], length, width).permute(2, 0, 1, 3) for part in found]
    factors[2] = torch.randn(1, rows, groups, width).expand(length, -1, -1, -1)
    inputs = [projection, *weights]
    gradients = [
        torch.autograd.grad(parts, inputs, [factor.to(parts[0].dtype) for factor in factors])
        for parts in (found, exact)
    ]
    with torch.no_grad():
        without = split_heads(mixed, width, norms, angles)
    assert all(torch.equal(*pair) for pair in zip(without, found, strict=True))
    for ours, theirs in zip((*found, *gradients[0]), (*exact, *gradients[1]), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        assert (ours.double() - theirs.double()).abs().max() <= 3e-6 * theirs.abs().max()
