"""Rollout engines that compute with other numbers than the trainer, for bench/study.py and bench/claims.py.

    rl.engine.kind=bench.rounded_engine:rounded_engine
    rl.engine.kind=bench.rounded_engine:noisy_engine

The first is the native engine on a copy of the policy with weights rounded to bf16, in the place of a server whose
kernels and types are not the trainer's: its probabilities and its routes are a little off. The second reports logprobs
with noise. The model lies on one rank.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from bench.copied_engine import built_copies, paired_tensors
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Decode, Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.types import Completion, Group, Prompt

NOISE_NATS = 1e-2
"""Standard deviation of the noise on each logprob."""


class RoundedEngine(MegatronEngine):
    """The native engine on a copy of the policy with weights in bf16; sums and activations stay as they are."""

    def __init__(self, config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> None:
        self._policy, self._copies = chunks, built_copies(config, mesh)
        super().__init__(self._copies, mesh, config.model, decode, config.rl.engine)

    @torch.no_grad()
    def update_weights(self, policy_version: int) -> None:
        """Copy the policy's weights, rounded."""
        for ours, theirs in paired_tensors(self._copies, self._policy):
            ours.copy_(theirs.bfloat16() if theirs.is_floating_point() else theirs)
        super().update_weights(policy_version)


def rounded_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> RoundedEngine:
    """Return the engine, as `rl.engine.kind` asks for it."""
    return RoundedEngine(config, chunks, mesh, decode)


class NoisyEngine(MegatronEngine):
    """The native engine with normal noise on the logprobs that it reports; what it samples is not changed."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Return the groups, with noise that depends on the seed of each completion alone."""
        groups = super().generate(prompts, sampling, seeds_PG)
        return [
            replace(group, completions=tuple(map(_noisy, group.completions, seeds_G)))
            for group, seeds_G in zip(groups, seeds_PG, strict=True)
        ]


def _noisy(completion: Completion, seed: int) -> Completion:
    draws = random.Random(seed)
    noisy_T = tuple(min(0.0, logprob + draws.gauss(0.0, NOISE_NATS)) for logprob in completion.logprobs_T)
    return replace(completion, logprobs_T=noisy_T)


def noisy_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> NoisyEngine:
    """Return the engine, as `rl.engine.kind` asks for it."""
    return NoisyEngine(chunks, mesh, config.model, decode, config.rl.engine)
