"""Samples of several segments: what a pass and an update of them are equals that of the segments as samples."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.replay import ReplayKind
from mcore_rl.config.rl.loss import UpdateConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.model.build import copy_in
from mcore_rl.rl.batch import Advantages, at_positions
from mcore_rl.rl.step.learner import Learner, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.types import Completion, Group, Rollout, SampleShape, single_version
from tests.generating import prompt_of
from tests.parallel.parity import MESHES, Tensors, owned, random_weights, set_up_plain
from tests.parallel.rl_steps import random_routes, run_config
from tests.ranks import run_ranks
from tests.sections import loss_config
from tests.tiny_models import TINY, shallow

LENGTHS = [[(3, 4)], [(2, 5), (4, 3)], [(1, 2), (3, 4), (2, 2)], [(5, 1), (1, 1)], [(2, 2), (6, 1)], [(4, 6)]]
"""For each sample, the tokens of each segment: those that are read, then those that are sampled."""


def config_of(mesh: str, replay: ReplayKind = "r2") -> RlRunConfig:
    """One update of all samples, whose loss is a mean over tokens."""
    model = shallow(TINY["qwen3_moe"]) if MESHES[mesh].pp == 1 else TINY["qwen3_moe"]
    optim = OptimConfig(lr=1e-3, schedule="constant", clip_grad=0.3)
    update = UpdateConfig(max_tokens_per_microbatch=48)
    loss = loss_config(kind="grpo", aggregation="token_mean")
    return run_config(model, MESHES[mesh], replay, optim, loss=loss, update=update)


def segments_of(config: RlRunConfig) -> list[list[tuple[Tensor, int, Tensor, Tensor]]]:
    """For each segment of each sample its tokens, the number of them that are read, logprobs of the rest, routes."""
    generator = torch.Generator().manual_seed(3)
    return [
        [
            (
                torch.randint(0, config.model.vocab_size, (read + sampled,), generator=generator),
                read,
                -1 - torch.rand(sampled, generator=generator),
                random_routes(config, read + sampled - 1, generator),
            )
            for read, sampled in sample
        ]
        for sample in LENGTHS
    ]


def rollout_of(config: RlRunConfig, rank: int, size: int, *, is_split: bool) -> tuple[Rollout, dict[int, Tensor]]:
    """Samples of these segments, or with `is_split` each segment as a sample, and the advantage of each token."""
    samples: Sequence[Any] = segments_of(config)
    if is_split:
        samples = [[segment] for sample in samples for segment in sample]
    groups, shapes, advantages, count = {}, {}, {}, 0
    for n, sample in enumerate(samples):
        tokens = torch.cat([tokens for tokens, *_ in sample]).tolist()
        num_prompt = sample[0][1]
        starts = [0, *torch.tensor([len(tokens) for tokens, *_ in sample]).cumsum(0).tolist()]
        spans = tuple(
            (start + read - num_prompt, end - num_prompt)
            for (start, end), (_, read, *_) in zip(pairwise(starts), sample, strict=True)
        )
        logprobs_C = torch.zeros(len(tokens) - num_prompt)
        for (start, end), (_, _, logprobs, _) in zip(spans, sample, strict=True):
            logprobs_C[start:end] = logprobs
        completion = Completion(
            text="",
            tokens_T=tuple(tokens[num_prompt:]),
            logprobs_T=tuple(logprobs_C.tolist()),
            versions=single_version(0, len(logprobs_C)),
            finish="stop",
            experts_TLK=torch.cat([routes for *_, routes in sample]) if config.wants_engine_routes else None,
            segments=tuple(start - num_prompt for start in starts[1:-1]),
        )
        shapes[n] = SampleShape(
            replica_rank=n % size,
            num_prompt_tokens=num_prompt,
            num_completion_tokens=len(logprobs_C),
            is_trained=True,
            sampled_spans=spans,
            segments=completion.segments,
        )
        if n % size == rank:
            groups[n] = Group(prompt=prompt_of(tokens[:num_prompt], str(n)), completions=(completion,))
        tokens_of_sample = torch.arange(count, count + shapes[n].num_sampled).float()
        advantages[n] = at_positions((tokens_of_sample - 15) / 10, shapes[n])
        count += shapes[n].num_sampled
    rewards_PG = torch.zeros(len(samples), 1, dtype=torch.float64)
    rollout = Rollout(groups=groups, rewards_PG=rewards_PG, shapes=shapes, num_prompts=len(samples), metrics=[])
    return rollout, advantages


def updated(config: RlRunConfig, initial: Tensors, is_split: bool) -> dict[str, Any]:
    """On a rank: the logprob of each token that is sampled before the update, on the last stage; the report of the
    update; the pieces of the weights after it.
    """
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    routes = PolicyRoutes(state, config.rl, config.replay)
    policy = policy_logprobs(state, config.rl, config.model.vocab_size)
    learner = Learner(state, config, routes, policy)
    rollout, advantages = rollout_of(config, state.mesh.dp_cp.rank, state.mesh.dp_cp.size, is_split=is_split)
    # One update of all samples, however many they are.
    learner.config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"global_batch": len(rollout.shapes)}),
            "rl": config.rl.model_copy(
                update={
                    "rollout": config.rl.rollout.model_copy(
                        update={"prompts_per_step": len(rollout.shapes), "group_size": 1}
                    )
                }
            ),
        }
    )
    [minibatch] = learner.minibatches(rollout)
    routes.begin(rollout, minibatch.microbatches)
    is_imposed = config.replay.kind == "r3"
    minibatch = policy.added(minibatch, "old_logprobs_T", routes.old_policy, is_imposed=is_imposed)
    logprobs = {}
    for one in minibatch.microbatches if state.mesh.is_last_stage else ():
        for t in one.mask_T.nonzero().flatten().tolist():
            sample = one.samples[int(one.sequence_T[t])]
            logprobs[sample, int(one.place_T[t])] = float(one.old_logprobs_T[t])
    settled = Advantages(of_samples=advantages)
    reports = [learner.update(minibatch, settled) for _ in range(2)]
    return {
        "logprobs": logprobs,
        "reports": [(one.loss, one.grad_norm) for one in reports if one is not None],
        "weights": owned(state),
    }


def in_order(ranks: list[dict[str, Any]], config: RlRunConfig, *, is_split: bool) -> list[float]:
    """The logprobs of all ranks in the order of the sampled tokens."""
    found = {key: value for rank in ranks for key, value in rank["logprobs"].items()}
    rollout, _ = rollout_of(config, 0, 1, is_split=is_split)
    return [found[n, p] for n, shape in sorted(rollout.shapes.items()) for p in shape.sampled_positions.tolist()]


@pytest.mark.matrix("pp2-r3")
@pytest.mark.parametrize(("mesh", "replay"), [("tp2", "r2"), ("ep2", "r2"), ("pp2", "r3"), ("cp2", "r2")])
def test_an_update_of_segments_is_that_of_their_sequences_alone(mesh: str, replay: ReplayKind) -> None:
    """On each mesh, against each segment as a sample of its own on one rank; of R3 the routes are random ones."""
    config = config_of(mesh, replay)
    weights = random_weights(config.model_copy(update={"mesh": MeshConfig()}))
    ranks = run_ranks(updated, config.mesh.smallest_world, config, weights, False)
    (alone,) = run_ranks(updated, 1, config.model_copy(update={"mesh": MeshConfig()}), weights, True)
    logprobs = in_order(ranks, config, is_split=False)
    assert logprobs == pytest.approx(in_order([alone], config, is_split=True), rel=0, abs=1e-5)
    assert len(set(logprobs)) == sum(sampled for sample in LENGTHS for _, sampled in sample)
    for rank in ranks:
        assert len(rank["reports"]) == 2
        for ours, theirs in zip(rank["reports"], alone["reports"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-6)
