"""Hooks that answer Megatron's routers while a tape records, imposes or observes their choice of experts.

A Megatron router with a `router_replay` asks it for the top-k of its scores, in the first forward pass and again in
each recomputation. Megatron's own RouterReplay has a single target, a queue for recomputation that assumes an order of
microbatches, and a list of all routers of the process. `RouterHook` instead knows which microbatch is running through
the chunk: the microbatch in its forward pass, else the microbatch in its backward pass, which a hook on the gradient of
the chunk's output reports.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.megatron.vocab import Logits, last_tensor

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True, kw_only=True)
class ChunkMicrobatch:
    """One microbatch in one chunk: `t` tokens, and the chunk's `l` routers. A code is the expert, plus `num_experts` if
    the expert had no room for the token.
    """

    index: int
    """Index of the microbatch in its pass."""
    num_experts: int
    imposed_ltK: Tensor | None
    """Codes that the routers must choose; None if routing is live."""
    is_live_t1: Tensor | None
    """Mask of the tokens that are routed live although routes are imposed; None if no token is."""
    live_ltK: Tensor
    """Filled with the codes that the routers chose, or would have chosen."""
    cached_ltK: Tensor | None
    """Codes that the live choice is compared with; None if it is not compared."""
    scores_ltK: Tensor | None
    """Filled with the scores of the live choice, for its gates; None if they are not needed."""
    ids_Bs: Tensor | None = None
    """Token ids that the chunk received."""


class ChunkRouters:
    """The routers of one chunk, and the hooks that a tape installs in them."""

    def __init__(self, chunk: nn.Module) -> None:
        """Find the routers. Raises ConfigError if a router cannot be replayed."""
        self.chunk = chunk
        pairs = replayed_routers(chunk)
        self.layers = tuple(layer for layer, _ in pairs)
        self.routers = [router for _, router in pairs]
        self.has_capacity = any(r.config.moe_expert_capacity_factor is not None for r in self.routers)
        # A dispatcher between ranks expects K experts per token, and fails with unequal sizes if there are fewer.
        self._needs_distinct = any(
            r.config.expert_model_parallel_size > 1 or (r.config.expert_tensor_parallel_size or 1) > 1
            for r in self.routers
        )
        self._num_doubled: dict[int, Tensor] = {}
        self._in_forward: ChunkMicrobatch | None = None
        self._in_backward: ChunkMicrobatch | None = None
        self._installed = ExitStack()
        self._check()

    def install(self) -> None:
        """Make every router of the chunk ask a hook of this object, until `remove` is called."""
        for column, router in enumerate(self.routers):
            assert router.router_replay is None, f"layer {self.layers[column]} has another tape"
            router.router_replay = RouterHook(self, column)
            self._installed.callback(setattr, router, "router_replay", None)
            if router.config.moe_expert_capacity_factor is not None:
                self._replay_drops(column, router)

    def remove(self) -> None:
        """Uninstall the hooks: every router is live again."""
        self._installed.close()
        self._in_forward = self._in_backward = None

    @contextmanager
    def forward(self, microbatch: ChunkMicrobatch) -> Iterator[None]:
        """Context for the chunk's forward pass of `microbatch`: the hooks answer the routers for this microbatch."""
        assert self._in_forward is None, f"microbatches {self._in_forward} and {microbatch} are in one chunk at once"
        self._in_forward = microbatch
        handles = [
            self.chunk.register_forward_pre_hook(self._on_input, with_kwargs=True),
            self.chunk.register_forward_hook(self._on_output),
        ]
        try:
            yield
        finally:
            self._in_forward = None
            for handle in handles:
                handle.remove()

    def current(self, column: int) -> tuple[ChunkMicrobatch, bool]:
        """Return the microbatch that the router is processing, and whether this is its forward pass."""
        # 1F1B runs forward passes of this chunk between its backward passes; only the latter recompute.
        if self._in_forward is not None:
            return self._in_forward, True
        assert self._in_backward is not None, (
            f"the router of layer {self.layers[column]} was asked outside of the passes of its tape"
        )
        return self._in_backward, False

    def distinct(self, column: int, experts_tK: Tensor) -> Tensor:
        """Return the imposed experts, but experts 0 to K - 1 for a token that has the same expert twice. Such routes
        end the pass in an error (`problems`); until then other ranks wait for this rank's tokens.
        """
        if not self._needs_distinct:
            return experts_tK
        is_same_tKK = experts_tK[:, :, None] == experts_tK[:, None, :]
        is_doubled_t = is_same_tKK.flatten(1).sum(1) > experts_tK.shape[1]
        self._num_doubled[column] = self._num_doubled.get(column, 0) + is_doubled_t.sum()
        first_K = torch.arange(experts_tK.shape[1], device=experts_tK.device)
        return first_K.where(is_doubled_t[:, None], experts_tK)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each layer with imposed routes that name an expert twice. Waits for the device."""
        if not self._num_doubled:
            return
        counts = torch.stack([*self._num_doubled.values()]).tolist()
        for column, count in zip(self._num_doubled, counts, strict=True):
            if count:
                yield (
                    f"layer {self.layers[column]}: imposed routes name an expert twice for a token ({count} times in "
                    "forward and recomputation): they are damaged"
                )

    def _check(self) -> None:
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(
                f"a chunk has two routers of one layer: {list(self.layers)}. One of the two never runs and would not "
                "be replayed. Build the decoder once."
            )
        for layer, router in zip(self.layers, self.routers, strict=True):
            config = router.config
            if config.moe_router_fusion or router.routing_type in ("sinkhorn", "quantile_balancing"):
                raise ConfigError(
                    f"the router of layer {layer} (moe_router_fusion={config.moe_router_fusion}, "
                    f"routing_type={router.routing_type!r}) does not ask which experts are imposed. Switch it off "
                    "(unfuse_routers)."
                )
            if getattr(config, "overlap_moe_expert_parallel_comm", False):
                raise ConfigError(
                    "overlap_moe_expert_parallel_comm runs the layers of two microbatches alternately, and a tape "
                    "cannot know for which of them a router asks. Switch it off."
                )

    def _on_input(self, chunk: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert self._in_forward is not None
        self._in_forward.ids_Bs = kwargs["input_ids"]

    def _on_output(self, chunk: nn.Module, args: Any, output: Logits) -> None:
        microbatch = self._in_forward
        assert microbatch is not None
        if last_tensor(output).requires_grad:
            # The gradient of the output arrives before any recomputation of this microbatch.
            last_tensor(output).register_hook(lambda _: self._begin_backward(microbatch))

    def _begin_backward(self, microbatch: ChunkMicrobatch) -> None:
        done, self._in_backward = self._in_backward, microbatch
        if done is not None and done is not microbatch:
            done.imposed_ltK = None  # frees the memory: its backward pass is over

    def _replay_drops(self, column: int, router: TopKRouter) -> None:
        """Apply the capacity and record the drops when routing is live; when routes are imposed, impose the same drops
        without capacity, which would drop by the other tokens of the microbatch and by the gates.
        """
        with_capacity = router.config
        without_capacity = copy.copy(with_capacity)
        without_capacity.moe_expert_capacity_factor = None

        def before(module: TopKRouter, inputs: Any) -> None:
            microbatch, _ = self.current(column)
            module.config = with_capacity if microbatch.imposed_ltK is None else without_capacity

        def after(module: TopKRouter, inputs: Any, output: tuple[Tensor, Tensor]) -> Any:
            microbatch, is_forward = self.current(column)
            module.config = with_capacity
            gates_TE, routed_TE = output
            live_tK, num_experts = microbatch.live_ltK[column], microbatch.num_experts
            if microbatch.imposed_ltK is None:
                if is_forward:
                    live_tK += num_experts * ~routed_TE.gather(1, live_tK.long())
                return None
            codes_tK = microbatch.imposed_ltK[column].long()
            dropped_TE = torch.zeros_like(routed_TE).scatter(1, codes_tK % num_experts, codes_tK >= num_experts)
            if microbatch.is_live_t1 is not None:
                dropped_TE &= ~microbatch.is_live_t1
            return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE

        # `prepend`: run before the counting hooks (model/router_load.py), which must see the map without the drops.
        self._installed.callback(router.register_forward_pre_hook(before).remove)
        self._installed.callback(router.register_forward_hook(after, prepend=True).remove)


class RouterHook:
    """Object that a router calls in place of Megatron's `RouterReplay`."""

    def __init__(self, chunk_routers: ChunkRouters, column: int) -> None:
        self._chunk_routers, self._column = chunk_routers, column

    @property
    def imposes(self) -> bool:
        """Whether experts are imposed on the microbatch that the router is processing."""
        return self._chunk_routers.current(self._column)[0].imposed_ltK is not None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' scores `[t, K]`, with gradient, and the experts `[t, K]`. Megatron's router calls
        this by name with scores `[t, E]` that include any expert bias. Scores of imposed experts are the live router's,
        so that it keeps learning.
        """
        microbatch, is_forward = self._chunk_routers.current(self._column)
        assert len(scores) == microbatch.live_ltK.shape[1], (
            f"layer {self._chunk_routers.layers[self._column]} routes {len(scores)} tokens, the layout of microbatch "
            f"{microbatch.index} has {microbatch.live_ltK.shape[1]}"
        )

        def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        if microbatch.imposed_ltK is None:
            values_tK, live_tK = choose(scores)
            if is_forward:
                self._note(microbatch, values_tK, live_tK)
            return values_tK, live_tK
        experts_tK = microbatch.imposed_ltK[self._column].long()
        if self._chunk_routers.has_capacity:
            experts_tK = experts_tK % microbatch.num_experts
        if is_forward:
            self._note(microbatch, *choose(scores.detach()))
        if microbatch.is_live_t1 is not None:
            # Recomputation uses the forward pass's choice too: its scores may be rounded differently.
            live_tK = microbatch.live_ltK[self._column].long()
            experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)
        experts_tK = self._chunk_routers.distinct(self._column, experts_tK)
        return scores.gather(1, experts_tK), experts_tK

    def _note(self, microbatch: ChunkMicrobatch, values_tK: Tensor, live_tK: Tensor) -> None:
        microbatch.live_ltK[self._column] = live_tK
        if microbatch.scores_ltK is not None:
            microbatch.scores_ltK[self._column] = values_tK.detach()


def live_gates(scores_ltK: Tensor, live_ltK: Tensor, routers: Sequence[TopKRouter]) -> Tensor:
    """Return the gates of the live choice, float32 `[K, l, t]`, normalised to sum to 1 over K. `scores_ltK` are the
    scores that the routers, all of the same kind, chose by: logits with `moe_router_pre_softmax=False`, with any expert
    bias.
    """
    router = routers[0]
    # K passes over long rows: twenty times as fast on a CPU as one softmax per token.
    scores_Klt = scores_ltK.permute(2, 0, 1).contiguous()
    if router.score_function == "softmax" and not router.config.moe_router_pre_softmax:
        return scores_Klt.softmax(0)
    if router.expert_bias is not None:
        # The bias affects only the choice; gates are computed from the scores without it.
        biases_lE = torch.stack([router.expert_bias for router in routers])
        bias_ltK = biases_lE.gather(1, live_ltK.long().flatten(1)).view_as(scores_ltK)
        scores_Klt = scores_Klt - bias_ltK.permute(2, 0, 1)
    return scores_Klt / scores_Klt.sum(0).clamp_min(1e-20)
