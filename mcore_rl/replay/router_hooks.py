"""What Megatron's routers ask for their choice of experts while a tape is in place.

A Megatron router asks its `router_replay`, when it has one, for the top-k of its scores, in the first forward pass and
in each recomputation. Megatron's own object there has one target, a queue for recomputation that assumes an order, and
a list of the process's routers; ours knows the microbatch: that of the chunk's forward in progress, or else that whose
backward is in progress, which the autograd graph of the chunk's output tells.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_rl.errors import ConfigError
from mcore_rl.parallel.routers import replayed_routers

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True, kw_only=True)
class Visit:
    """One microbatch in one chunk: `t` tokens, the chunk's `l` routers. Codes are experts in few bytes; a choice that
    found its expert full is the expert plus `num_experts`.
    """

    index: int
    imposed_ltK: Tensor | None
    """What each router has to choose; None: it is free."""
    is_free_t1: Tensor | None
    """Of these tokens it is free all the same; None: of none."""
    live_ltK: Tensor
    """Filled with what each router chose, or would have chosen."""
    known_ltK: Tensor | None
    """What the live choice is compared with; None: with nothing."""
    scores_ltK: Tensor | None
    """Filled with what the live choice was made by; None: not wanted."""
    num_experts: int
    asked: list[int] = field(default_factory=list)
    """How often each router asked, recomputation not counted."""
    recomputed: list[int] = field(default_factory=list)
    ids_Bs: Tensor | None = None
    """The token ids that the chunk was given."""

    def __post_init__(self) -> None:
        self.asked = [0] * len(self.live_ltK)
        self.recomputed = [0] * len(self.live_ltK)


class Station:
    """One chunk and its routers' hooks."""

    def __init__(self, chunk: nn.Module) -> None:
        self.chunk = chunk
        pairs = replayed_routers(chunk)
        self.layers = tuple(layer for layer, _ in pairs)
        self.routers = [router for _, router in pairs]
        self.has_drops = any(r.config.moe_expert_capacity_factor is not None for r in self.routers)
        self._forward: Visit | None = None
        self._backward: Visit | None = None
        self._installed = ExitStack()
        self._check()

    def install(self) -> None:
        """Every router asks here from now on."""
        for column, router in enumerate(self.routers):
            assert router.router_replay is None, f"layer {self.layers[column]} has another tape"
            router.router_replay = RouterHook(self, column)
            self._installed.callback(setattr, router, "router_replay", None)
            if router.config.moe_expert_capacity_factor is not None:
                self._carry_drops(column, router)

    def remove(self) -> None:
        """Every router chooses for itself again."""
        self._installed.close()
        self._forward = self._backward = None

    @contextmanager
    def forward(self, visit: Visit) -> Iterator[None]:
        """Around the chunk's forward of the visit's microbatch."""
        assert self._forward is None, f"microbatches {self._forward} and {visit} are in one chunk at once"
        self._forward = visit
        handles = [
            self.chunk.register_forward_pre_hook(self._on_input, with_kwargs=True),
            self.chunk.register_forward_hook(self._on_output),
        ]
        try:
            yield
        finally:
            self._forward = None
            for handle in handles:
                handle.remove()

    def current(self, column: int) -> tuple[Visit, bool]:
        """The microbatch that the asking router works on, and whether for the first time."""
        if self._forward is not None:
            return self._forward, True
        assert self._backward is not None, (
            f"the router of layer {self.layers[column]} was asked outside of the passes of its tape"
        )
        return self._backward, False

    def _check(self) -> None:
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(
                f"a chunk has routers of layers {list(self.layers)}: one twice. One of them is never asked, and would "
                "not be replayed. Build the decoder once."
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
                    "overlap_moe_expert_parallel_comm runs the layers of two microbatches by turns, of which a tape "
                    "cannot tell which is asking. Switch it off."
                )

    def _on_input(self, chunk: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert self._forward is not None
        self._forward.ids_Bs = kwargs["input_ids"]

    def _on_output(self, chunk: nn.Module, args: Any, output: Tensor) -> None:
        visit = self._forward
        assert visit is not None
        if output.requires_grad:
            # The gradient of the output comes before anything of this microbatch is computed again.
            output.register_hook(lambda _: self._begin_backward(visit))

    def _begin_backward(self, visit: Visit) -> None:
        done, self._backward = self._backward, visit
        if done is not None and done is not visit:
            done.imposed_ltK = None

    def _carry_drops(self, column: int, router: TopKRouter) -> None:
        """Capacity is obeyed where routes are live; where they are imposed, so is what found its expert full."""
        whole = router.config
        unlimited = copy.copy(whole)
        unlimited.moe_expert_capacity_factor = None

        def before(module: TopKRouter, inputs: Any) -> None:
            visit, _ = self.current(column)
            module.config = whole if visit.imposed_ltK is None else unlimited

        def after(module: TopKRouter, inputs: Any, output: tuple[Tensor, Tensor]) -> Any:
            visit, is_first = self.current(column)
            module.config = whole
            gates_TE, routed_TE = output
            live_tK, experts = visit.live_ltK[column], visit.num_experts
            if visit.imposed_ltK is None:
                if is_first:
                    live_tK += experts * ~routed_TE.gather(1, live_tK.long())
                return None
            codes_tK = visit.imposed_ltK[column].long()
            dropped_TE = torch.zeros_like(routed_TE).scatter(1, codes_tK % experts, codes_tK >= experts)
            if visit.is_free_t1 is not None:
                dropped_TE &= ~visit.is_free_t1
            return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE

        # Before the hooks of others, who count what is left.
        self._installed.callback(router.register_forward_pre_hook(before).remove)
        self._installed.callback(router.register_forward_hook(after, prepend=True).remove)


class RouterHook:
    """Stands where Megatron has a `RouterReplay`."""

    def __init__(self, station: Station, column: int) -> None:
        self._station, self._column = station, column

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Values `[t, K]` with their gradient, and experts `[t, K]`; named and called by Megatron's router."""
        visit, is_first = self._station.current(self._column)
        assert len(scores) == visit.live_ltK.shape[1], (
            f"layer {self._station.layers[self._column]} routes {len(scores)} tokens, the layout of microbatch "
            f"{visit.index} has {visit.live_ltK.shape[1]}"
        )
        (visit.asked if is_first else visit.recomputed)[self._column] += 1

        def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        if visit.imposed_ltK is None:
            values_tK, live_tK = choose(scores)
            if is_first:
                self._note(visit, values_tK, live_tK)
            return values_tK, live_tK
        experts_tK = visit.imposed_ltK[self._column].long()
        if self._station.has_drops:
            experts_tK = experts_tK % visit.num_experts
        if is_first or visit.is_free_t1 is not None:
            values_tK, live_tK = choose(scores.detach())
            if is_first:
                self._note(visit, values_tK, live_tK)
            if visit.is_free_t1 is not None:
                experts_tK = live_tK.where(visit.is_free_t1, experts_tK)
        return scores.gather(1, experts_tK), experts_tK

    def _note(self, visit: Visit, values_tK: Tensor, live_tK: Tensor) -> None:
        visit.live_ltK[self._column] = live_tK
        if visit.scores_ltK is not None:
            visit.scores_ltK[self._column] = values_tK.detach()


def live_gates(scores_ltK: Tensor, live_ltK: Tensor, routers: Sequence[TopKRouter]) -> Tensor:
    """Float32 gates of the live choice that sum to one over K, from the scores that it was made by."""
    router = routers[0]
    if router.score_function == "softmax" and not router.config.moe_router_pre_softmax:
        return scores_ltK.softmax(-1)
    if router.expert_bias is not None:
        biases_lE = torch.stack([router.expert_bias for router in routers])
        scores_ltK = scores_ltK - biases_lE.gather(1, live_ltK.long().flatten(1)).view_as(scores_ltK)
    return scores_ltK / scores_ltK.sum(-1, keepdim=True).clamp_min(1e-20)
