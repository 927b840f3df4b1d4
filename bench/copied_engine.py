"""A rollout engine in this process that generates while the policy trains, for bench/staleness.py and tests.

    rl.engine.kind=bench.copied_engine:copied_engine

It is the native engine on a copy of the policy's modules, with the members of an engine of servers
(`rl.engines.base.AskingEngine`). Each completion is generated `SEGMENT_TOKENS` tokens at a time. Between two of these
parts an update of the weights may come, after which all keys and values are computed anew, as on a server that is told
to forget them. COPIED_ENGINE_DELAY_S seconds are slept for each part, in which a real server would be computing on a
device of its own. The model lies on one rank, and replicas share no experts.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.rl.engines.base import Capabilities, Decode, QuietEngine, Sampling, check_request
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.types import Completion, Group, Prompt, VersionSpan, grown_routes

SEGMENT_TOKENS = 4
"""Tokens that are generated between two moments at which the weights may change."""


class CopiedEngine(QuietEngine):
    """The native engine on a copy of the policy, asked from several threads."""

    asks = True

    def __init__(
        self, config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode, delay_s: float
    ) -> None:
        copies = built_copies(config, mesh)
        self.decode = decode
        self._policy, self._copies, self._delay_s = list(chunks), copies, delay_s
        self._native = MegatronEngine(copies, mesh, config.model, decode, config.rl.engine)
        self._one_at_a_time = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the native engine."""
        return self._native.capabilities

    @property
    def policy_version(self) -> int:
        """Version of the copy."""
        return self._native.policy_version

    @torch.no_grad()
    def update_weights(self, policy_version: int) -> None:
        """Copy the policy's weights between two parts of completions."""
        with self._one_at_a_time:
            for ours, theirs in paired_tensors(self._copies, self._policy):
                ours.copy_(theirs)
            self._native.update_weights(policy_version)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Return a group for each prompt; all are asked for at once."""
        check_request(prompts, sampling, seeds_PG, self.capabilities)
        if not prompts:
            return []
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(
                threads.map(lambda p: self.request_group(p, prompts[p], sampling, seeds_PG[p]), range(len(prompts)))
            )

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the completions of one prompt, part by part."""
        check_request([prompt], sampling, [seeds_G], self.capabilities)
        assert not sampling.stop_strings, "a stop string may lie in two parts"
        completions: dict[int, Completion | None] = dict.fromkeys(range(len(seeds_G)))
        going = list(completions)
        while going:
            time.sleep(self._delay_s)
            befores = [completions[g] for g in going]
            parts = self._parts(prompt, befores, sampling, [seeds_G[g] for g in going])
            for g, before, part in zip(going, befores, parts, strict=True):
                completions[g] = part if before is None else self._joined(before, part, sampling)
            going = [g for g in going if self._goes_on(completions[g], sampling)]
        return Group(prompt=prompt, completions=tuple(one for one in completions.values() if one is not None))

    def of_stage(self, group: Group, stage: int) -> Group:
        """Return the group: there is one stage."""
        return group

    def _parts(
        self, prompt: Prompt, befores: Sequence[Completion | None], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return the next tokens of completions of one prompt, by the weights of one version."""
        tokens = [() if before is None else before.tokens_T for before in befores]
        # All of them are in step: those that go on have the same length.
        left = min(SEGMENT_TOKENS, sampling.max_new_tokens - len(tokens[0]))
        prompts = [replace(prompt, tokens_T=(*prompt.tokens_T, *tokens_T)) for tokens_T in tokens]
        # Draws depend on seed and position, so that parts draw what the whole would.
        with self._one_at_a_time:
            groups = self._native.generate(prompts, replace(sampling, max_new_tokens=left), [[seed] for seed in seeds])
        return [group.completions[0] for group in groups]

    def _joined(self, before: Completion, part: Completion, sampling: Sampling) -> Completion:
        tokens_T = before.tokens_T + part.tokens_T
        return replace(
            part,
            text=self.decode(tokens_T[:-1] if tokens_T[-1] in sampling.stop_tokens else tokens_T),
            tokens_T=tokens_T,
            logprobs_T=before.logprobs_T + part.logprobs_T,
            kept_logprobs_T=_joined_numbers(before.kept_logprobs_T, part.kept_logprobs_T),
            versions=joined_versions(before.versions, part.policy_version, len(tokens_T)),
            experts_TLK=_joined_routes(before.experts_TLK, part.experts_TLK),
        )

    @staticmethod
    def _goes_on(completion: Completion | None, sampling: Sampling) -> bool:
        assert completion is not None
        return completion.finish == "length" and len(completion.tokens_T) < sampling.max_new_tokens


def built_copies(config: RlRunConfig, mesh: Mesh) -> list[nn.Module]:
    """Return modules like the policy's, of a model that lies on one rank; their weights are still to be copied."""
    assert mesh.tp.size == mesh.pp.size == mesh.ep.size == mesh.etp.size == 1, mesh.config
    settings = config.platform.model_copy(update={"layers": "torch"})
    with torch.random.fork_rng():
        return build_model(config.model, mesh, start(settings), settings)


def paired_tensors(copies: Sequence[nn.Module], policy: Sequence[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter and buffer of the copies with that of the policy."""
    for copy, model in zip(map(unwrap, copies), map(unwrap, policy), strict=True):
        yield from zip(copy.parameters(), model.parameters(), strict=True)
        yield from zip(copy.buffers(), model.buffers(), strict=True)


def joined_versions(before: tuple[VersionSpan, ...], version: int, end: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a completion that goes on to `end` with the weights of `version`."""
    last = before[-1]
    if last.version == version:
        return (*before[:-1], VersionSpan(version, last.start, end))
    return (*before, VersionSpan(version, last.end, end))


def _joined_numbers(before_T: tuple[float, ...] | None, part_T: tuple[float, ...] | None) -> tuple[float, ...] | None:
    return None if before_T is None or part_T is None else before_T + part_T


def _joined_routes(before: Tensor | None, part: Tensor | None) -> Tensor | None:
    return None if before is None or part is None else grown_routes(before, part, len(before))


def copied_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> CopiedEngine:
    """Return the engine, as `rl.engine.kind` asks for it."""
    return CopiedEngine(config, chunks, mesh, decode, float(os.environ.get("COPIED_ENGINE_DELAY_S", "0")))
