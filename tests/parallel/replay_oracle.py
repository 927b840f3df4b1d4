"""Routes, and drops, read and imposed on one rank without any part of mcore_rl.replay, to check it against."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.model.global_tensors import copy_in
from tests.parallel.parity import Tensors
from tests.parallel.replaying import Case, Run, opened, perturbed

Choice = dict[int, tuple[list[int], list[bool]]]
"""Token's name -> its top-k experts, and which of them had room."""


def replayed_by_hand(
    model: ModelConfig, weights: Tensors, layouts: tuple[str, ...], left_out: frozenset[int] = frozenset()
) -> list[dict[str, Any]]:
    """On one rank, for each layout: losses and gradients of other weights under the choices, and the drops, that the
    routers made with `weights`; tokens whose names are `left_out` are routed live.
    """
    runs = opened(Case(model="", mesh=MeshConfig(), layouts=layouts), model)
    found = []
    for run in runs:
        copy_in(run.state.chunks, weights)
        choices = [
            {name: chosen for name, chosen in choice.items() if name not in left_out}
            for choice in natural_choices(run)
        ]
        copy_in(run.state.chunks, perturbed(weights))
        losses, gradients = imposed_by_hand(run, choices)
        dropped = sum(
            not has_room for choice in choices for _, rooms in choice.values() for has_room in rooms
        )
        found.append({"losses": losses, "gradients": gradients, "dropped": dropped, "choices": choices})
    destroy_mesh()
    return found


def routers_of(run: Run) -> list[Any]:
    """All routers of the one chunk, in order of their layers."""
    return [router for chunk in run.state.chunks for _, router in replayed_routers(chunk)]


def names_in_router_order(run: Run) -> list[list[int]]:
    """Name of each token as a router sees it: on one rank `[B, S]` is transposed to `[S, B]`; -1 for padding."""
    return [names_BS.t().flatten().tolist() for names_BS in run.names]


def natural_choices(run: Run) -> list[Choice]:
    """The routers' own choices in a free pass, one for each call: microbatch by microbatch, and in each by layer."""
    calls: list[tuple[Tensor, Tensor]] = []

    def read(router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        experts_TK = chosen_by_hand(router, inputs[0].flatten(0, 1).float() @ router.weight.float().t())
        calls.append((experts_TK, output[1].gather(1, experts_TK)))

    hooks = [router.register_forward_hook(read) for router in routers_of(run)]
    run.evaluate()
    for hook in hooks:
        hook.remove()
    num_layers, choices = len(hooks), []
    for index, (experts_TK, has_room_TK) in enumerate(calls):
        names = names_in_router_order(run)[index // num_layers]
        tokens = zip(names, experts_TK.tolist(), has_room_TK.tolist(), strict=True)
        choices.append({name: (experts, rooms) for name, experts, rooms in tokens if name >= 0})
    return choices


def chosen_by_hand(router: Any, logits_TE: Tensor) -> Tensor:
    """The top-k of the logits (Qwen3); or of biased sigmoids in the best groups (DeepSeek-V3), where a group is as good
    as its best experts that fit.
    """
    if router.score_function == "softmax":
        return logits_TE.topk(router.topk).indices
    scores_TE = logits_TE.sigmoid() + router.expert_bias
    groups, chosen = router.config.moe_router_num_groups, router.config.moe_router_group_topk
    scores_TGe = scores_TE.view(len(scores_TE), groups, -1)
    of_group_TG = scores_TGe.topk(router.topk // chosen).values.sum(-1)
    is_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter(
        1, of_group_TG.topk(chosen).indices, False
    )
    return scores_TGe.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1).topk(router.topk).indices


def gates_by_hand(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """The softmax of the chosen logits (Qwen3); or the chosen sigmoids over their sum, scaled (DeepSeek-V3)."""
    chosen_TK = logits_TE.gather(1, experts_TK)
    if router.score_function == "softmax":
        return chosen_TK.softmax(-1)
    scores_TK = chosen_TK.sigmoid()
    return scores_TK / scores_TK.sum(-1, keepdim=True) * router.config.moe_router_topk_scaling_factor


def imposed_by_hand(run: Run, choices: list[Choice]) -> tuple[dict[int, float], list[Any]]:
    """Losses and gradients of a pass in which every router's forward is replaced by the formula.

    A gate without room is zero, and the others keep their size.
    """
    routers, names = routers_of(run), names_in_router_order(run)
    calls = iter(range(len(choices)))

    def imposing(router: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        def forward(hidden_SBD: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
            call = next(calls)
            choice = choices[call]
            logits_TE = hidden_SBD.flatten(0, 1).float() @ router.weight.float().t()
            # Tokens without a choice are routed live, and padding, whose output reaches no token and no loss.
            live = [(experts, [True] * router.topk) for experts in chosen_by_hand(router, logits_TE).tolist()]
            of_call = zip(names[call // len(routers)], live, strict=True)
            rows = [choice.get(name, chosen) for name, chosen in of_call]
            experts_TK, has_room_TK = (torch.tensor(column) for column in zip(*rows, strict=True))
            gates_TK = gates_by_hand(router, logits_TE, experts_TK) * has_room_TK
            gates_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, gates_TK)
            return gates_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, experts_TK, has_room_TK)

        return forward

    for router in routers:
        router.forward = imposing(router)
    result = run.gradients()
    for router in routers:
        del router.forward
    assert next(calls, None) is None, "a router was not called"
    return result
