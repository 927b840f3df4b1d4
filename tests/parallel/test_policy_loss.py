"""Sequences cut over two context-parallel ranks give the loss and the gradients of one rank."""

import pytest
import torch
import torch.distributed as dist

from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.step.losses import policy_loss
from mcore_rl.rl.step.objective import policy_objective
from tests.ranks import run_ranks
from tests.sections import loss_config
from tests.unit.rl.ragged import PADDED, batch, tokens_of

CONFIGS = [
    loss_config(
        kind=kind,
        entropy_coeff=0.1,
        kl_coeff=0.1,
        **(
            {}
            if mismatch is None
            else {"importance_sampling": mismatch, "importance_sampling_low": 0.9, "importance_sampling_high": 1.1}
        ),
    )
    for kind, mismatch in [
        ("grpo", "mask"),
        ("gspo", "sequence_mask"),
        ("gspo_token", "truncate"),
        ("rspo", "sequence_truncate"),
        ("kimi_k2", None),
        ("cispo", "sequence_truncate"),
    ]
]


def on_a_part(cp):
    """Sums, maxima and the gradient of every config from this rank's part of each row."""
    part = torch.arange(PADDED).chunk(cp.size)[cp.rank]
    results = []
    for config in CONFIGS:
        rows = batch()
        leaf = rows["logprobs"].requires_grad_()
        whole = tokens_of(rows, config.aggregation_in_use)
        mine = {
            name: values_T.unflatten(0, (-1, PADDED))[:, part].flatten()
            for name in whole.__slots__
            if name.endswith("_T") and (values_T := getattr(whole, name)) is not None
        }
        tokens = type(whole)(**mine, lengths_N=whole.lengths_N)
        loss = policy_loss(tokens, policy_objective(config), cp)
        (gradient,) = torch.autograd.grad(loss.loss, leaf)
        numbers = [{name: float(x) for name, x in values.items()} for values in (loss.sums, loss.maxima)]
        results.append((*numbers, gradient))
    return results


def on_a_rank():
    return on_a_part(Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size()))


def test_context_parallelism_changes_neither_loss_nor_gradient():
    alone = on_a_part(Axis(None, 0, 1))
    ranks = run_ranks(on_a_rank, 2)
    for (sums, maxima, gradient), *parts in zip(alone, *ranks, strict=True):
        assert {name: sum(part[0][name] for part in parts) for name in sums} == pytest.approx(sums, rel=1e-12)
        assert {name: max(part[1][name] for part in parts) for name in maxima} == maxima
        torch.testing.assert_close(sum(part[2] for part in parts), gradient, rtol=1e-12, atol=1e-15)
        assert gradient.abs().max() > 0
