"""A rollout engine that computes with other numbers than the trainer, for bench/study.py.

    rl.engine.kind=bench.rounded_engine:rounded_engine

It is the native engine on a copy of the policy with weights rounded to bf16, in the place of a server whose kernels
and types are not the trainer's: its probabilities and its routes are a little off. The model lies on one rank.
"""

from collections.abc import Sequence

import torch
from torch import nn

from bench.copied_engine import built_copies, paired_tensors
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Decode
from mcore_rl.rl.engines.native.engine import MegatronEngine


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
