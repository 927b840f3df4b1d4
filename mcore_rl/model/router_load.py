"""The load of the experts: how many tokens each expert of each layer processes, and the losses that even it out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.patches.router_losses import take_loss_sums
from mcore_rl.megatron.routers import routers
from mcore_rl.metrics.metrics import Metric


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """Counts of the routers' decisions, and losses, since the last reset; rows are layers, then MTP layers."""

    tokens_LE: Tensor
    """Number of tokens that expert e of layer l processed, int64."""
    dropped_L: Tensor
    """Number of a layer's choices that were dropped because the expert was full, int64."""
    num_layers: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Balance loss and z-loss, by metric: means over tokens, then over layers. A loss that no training pass has
    computed is left out."""

    def metrics(self) -> list[Metric]:
        """Return the metrics `moe/...` of the layers and `mtp/...` of the MTP layers, described in METRICS."""
        end = self.num_layers
        return [
            *(Metric(name, loss) for name, loss in self.losses.items()),
            *_metrics("moe", self.tokens_LE[:end], self.dropped_L[:end]),
            *_metrics("mtp", self.tokens_LE[end:], self.dropped_L[end:]),
        ]


class RouterLoad:
    """Hooks on the routers of this rank's chunks that count their decisions, without waiting for the device. Forward
    passes count that record gradients: a training token once, even if recomputed, evaluation and padding not.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        config = get_model_config(chunks[0])
        assert not config.moe_pad_expert_input_to_capacity, "padding would be counted as tokens"
        self._num_layers: int = config.num_layers
        num_rows, num_experts = config.num_layers + (config.mtp_num_layers or 0), config.num_moe_experts or 0
        # The last column counts dropped choices: one tensor needs one collective.
        device = next(chunks[0].parameters()).device
        self._counts_LE = torch.zeros(num_rows, num_experts + 1, dtype=torch.int64, device=device)
        self._routers = [pair for chunk in chunks for pair in routers(chunk)]
        for layer, router in self._routers:
            router.register_forward_hook(self._counter(layer, router))
        has_balance = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff > 0
        self._losses = {"moe/aux_loss": has_balance, "moe/z_loss": bool(config.moe_z_loss_coeff)}
        """Whether the model has the loss of each metric, in the order of `take_loss_sums`."""

    def gather(self, mesh: Mesh) -> ExpertLoads:
        """Collective over the world: return counts and losses of all layers on the CPU, and reset them."""
        # Without SP all tensor-parallel ranks would count the same tokens; Megatron refuses to train that way.
        assert mesh.sequence_parallel or mesh.tp.size == 1
        # float64 for both, which is exact for counts: one collective.
        table_LX = nn.functional.pad(self._counts_LE, (0, 3)).double()
        self._counts_LE.zero_()
        for layer, router in self._routers:
            sums_3 = take_loss_sums(router)
            if sums_3 is not None:
                table_LX[layer, -3:] += sums_3
        dist.all_reduce(table_LX, group=mesh.world.group)
        counts_LE, sums_L3 = table_LX.cpu().tensor_split([-3], 1)
        return ExpertLoads(counts_LE[:, :-1].long(), counts_LE[:, -1].long(), self._num_layers, self._means(sums_L3))

    def _means(self, sums_L3: Tensor) -> dict[str, float]:
        sums_L3 = sums_L3[sums_L3[:, 2] > 0]
        if not len(sums_L3):
            return {}
        means = (sums_L3[:, :2] / sums_L3[:, 2:]).mean(0).tolist()
        named = zip(self._losses.items(), means, strict=True)
        return {name: mean for (name, is_on), mean in named if is_on}

    def _counter(self, layer: int, router: TopKRouter) -> Callable[..., None]:
        counts_E, dropped = self._counts_LE[layer, :-1], self._counts_LE[layer, -1]
        top_k, may_drop = router.topk, router.config.moe_expert_capacity_factor is not None

        def count(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            if not torch.is_grad_enabled():
                return
            _, routed_TE = output
            # Megatron's inference router returns expert indices instead of a map, but records no gradients.
            assert routed_TE.dtype == torch.bool
            num_tokens: int | Tensor = len(routed_TE)
            is_padding = inputs[1] if len(inputs) > 1 else None
            if is_padding is not None:
                is_token_T = ~is_padding.reshape(-1)
                routed_TE, num_tokens = routed_TE & is_token_T[:, None], is_token_T.sum()
            tokens_E = routed_TE.sum(0)
            # In place and on the device: reading a number on the host would wait for all earlier kernels.
            counts_E.add_(tokens_E)
            if may_drop:
                dropped.add_(num_tokens * top_k - tokens_E.sum())

        return count


def load_max_over_mean(tokens_E: Tensor) -> float:
    """Return the tokens of the busiest expert over the mean: 1 if even, E if a single expert has all tokens."""
    return float(tokens_E.max() * len(tokens_E) / tokens_E.sum())


def load_entropy(tokens_E: Tensor) -> float:
    """Return the entropy of the experts' shares over log E: 1 if even, 0 if a single expert has all tokens."""
    shares_E = tokens_E.double() / tokens_E.sum()
    return float(torch.special.entr(shares_E).sum()) / math.log(len(tokens_E))


def _metrics(prefix: str, tokens_LE: Tensor, dropped_L: Tensor) -> list[Metric]:
    used = [layer for layer in range(len(tokens_LE)) if tokens_LE[layer].any()]
    if not used:
        return []
    by_layer = {
        "load_max_over_mean": [load_max_over_mean(tokens_LE[layer]) for layer in used],
        "load_entropy": [load_entropy(tokens_LE[layer]) for layer in used],
    }
    metrics = [
        Metric(f"{prefix}/layer_{layer:02d}/{name}", value)
        for name, values in by_layer.items()
        for layer, value in zip(used, values, strict=True)
    ]
    metrics += [Metric(f"{prefix}/{name}", sum(values), len(used)) for name, values in by_layer.items()]
    dropped = int(dropped_L.sum())
    return [
        *metrics,
        Metric(f"{prefix}/dropped_tokens", dropped),
        Metric(f"{prefix}/dropped_fraction", dropped, dropped + int(tokens_LE.sum())),
        Metric(f"{prefix}/expert_load", tokens_LE),
    ]
