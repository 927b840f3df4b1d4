"""The weight of the routers' losses."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from mcore_rl.megatron.mesh import Mesh


@pytest.mark.parametrize("held", [None, (), (1,)])
def test_it_can_be_set_whatever_a_pass_before_has_left(
    held: tuple[int, ...] | None, one_rank: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass without a schedule leaves a scalar, the schedule asks with one element."""
    before = None if held is None else torch.ones(held)
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", before)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([3.0]))
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert scale is not None and scale.item() == 3.0
