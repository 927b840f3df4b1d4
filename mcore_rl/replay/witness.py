"""The witness of a pass: which experts each router gave its tokens to, and with which gates.

A tape (tape.py) answers routers before they choose. The witness observes their outputs, after every other hook, and
shares no code with the tape: it tracks independently which microbatch a router is processing, and lays out tokens by
its own formula (`labels_at_routers`). Three things are checked, all on the device until the pass is over:

- a checksum of the experts used by the tokens with routes, for each sample and layer, in the forward pass and again in
  recomputation;
- for a few tokens of every microbatch and layer, that the gates are equal to the gates that the router's definition
  gives for the live logits and the used experts, and, if the choice is live, that the experts are the best. In a pass
  with imposed routes, all tokens that lack routes, and are therefore routed live, are checked;
- once per layer and pass, in a microbatch that varies with layer and version, that the derivative of the gates by the
  logits is equal to the derivative of the definition.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_rl.errors import RoutingError
from mcore_rl.megatron.agree import refuse_anywhere
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import to_device
from mcore_rl.megatron.routers import best_in_groups, own_group_score, replayed_routers
from mcore_rl.megatron.schedule import Routing
from mcore_rl.megatron.vocab import Logits, last_tensor
from mcore_rl.replay.accounts import expert_hashes, token_hashes
from mcore_rl.replay.cache import MicrobatchLayout

SAMPLED_TOKENS = 4
"""Number of tokens per microbatch and layer for which gates are recomputed."""
BATCHED_CALLS, BATCHED_TOKENS = 64, 4096
"""Router calls, and tokens, that are compared in one batch: dozens of calls cost as much as a single call."""
GATE_TOLERANCE = 1e-5
"""Largest allowed difference of a gate; logits and gates are float32 (`moe_router_dtype`)."""
DERIVATIVE_TOLERANCE = 1e-4

OnCall = Callable[[int, TopKRouter, Tensor, Tensor, Tensor], None]
"""Function called after a router: layer, router, logits `[t, E]`, gates `[t, E]` and used experts `[t, E]` (bool)."""


class RouterWatch:
    """Hooks on the routers of chunks that observe each router's logits and outputs."""

    def __init__(self, on_call: Callable[[nn.Module], OnCall]) -> None:
        """`on_call(chunk)` returns the function to call for the routers of a chunk."""
        self._on_call = on_call
        self._logits: dict[int, Tensor] = {}
        self._installed = ExitStack()

    def install(self, chunks: Sequence[nn.Module]) -> None:
        """Observe every router that affects the model's logits, until `remove` is called."""
        for chunk in chunks:
            on_call = self._on_call(chunk)
            for layer, router in replayed_routers(chunk):
                self._watch(layer, router, on_call)

    def remove(self) -> None:
        """Stop observing."""
        self._installed.close()
        self._logits.clear()

    def _watch(self, layer: int, router: TopKRouter, on_call: OnCall) -> None:
        gating, hidden = router.gating, router.__dict__.get("gating")

        def keeping(*args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = gating(*args, **kwargs)
            self._logits[layer] = logits
            return logits

        def after(module: TopKRouter, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            gates_TE, used_TE = output
            assert used_TE.dtype == torch.bool, f"the router of layer {layer} returned no map of its experts"
            on_call(layer, module, self._logits.pop(layer), gates_TE, used_TE)

        # `gating` is a method of the class: an instance attribute hides it until it is deleted.
        router.gating = keeping
        if hidden is None:
            self._installed.callback(delattr, router, "gating")
        else:  # set by another watch, which will be removed after this watch
            self._installed.callback(setattr, router, "gating", hidden)
        self._installed.callback(router.register_forward_hook(after).remove)


class SampledTokens:
    """Compares gates and experts of sampled tokens with the router's definition."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, TopKRouter, Tensor | None, Tensor, Tensor, Tensor, bool | Tensor]] = []
        self._num_tokens = 0
        self._found: list[tuple[list[str], list[int], Tensor]] = []

    def add(
        self,
        where: str,
        router: TopKRouter,
        logits_TE: Tensor,
        gates_TE: Tensor,
        used_TE: Tensor,
        row_n: Tensor,
        is_live: bool | Tensor,
    ) -> None:
        """Store the tokens `row_n` of one call for comparison: live logits, the router's gates, and the experts used.
        `where` names layer and microbatch in errors; `is_live` is for all of these tokens or a mask.
        """
        kept = [values.detach()[row_n] for values in (logits_TE, gates_TE, used_TE)]
        # A copy: finalize_model_grads updates the expert bias before the tokens are compared.
        bias_E = None if router.expert_bias is None else router.expert_bias.detach().clone()
        self._calls.append((where, router, bias_E, kept[0], kept[1], kept[2], is_live))
        self._num_tokens += len(row_n)
        if len(self._calls) == BATCHED_CALLS or self._num_tokens >= BATCHED_TOKENS:
            self._compare()

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each call with a wrong token. Waits for the device."""
        self._compare()
        if not self._found:
            return
        wrong = torch.cat([wrong_3n for _, _, wrong_3n in self._found], 1).any(0)
        if not bool(wrong.any()):
            return
        for places, sizes, wrong_3n in self._found:
            for where, part_3n in zip(places, wrong_3n.split(sizes, 1), strict=True):
                for what, is_wrong in zip(WRONG, part_3n.any(1).tolist(), strict=True):
                    if is_wrong:
                        yield f"{where}: {what}"

    def _compare(self) -> None:
        calls, self._calls, self._num_tokens = self._calls, [], 0
        if not calls:
            return
        places, routers, biases, logits, gates, used, lives = zip(*calls, strict=True)
        sizes = [len(logits_nE) for logits_nE in logits]
        logits_nE, gates_nE, used_nE = torch.cat(logits), torch.cat(gates), torch.cat(used)
        is_live_n = torch.cat(
            [
                live if isinstance(live, Tensor) else used_nE.new_full((size,), live)
                for live, size in zip(lives, sizes, strict=True)
            ]
        )
        bias_nE = None
        if biases[0] is not None:
            bias_nE = torch.cat([b.expand(size, -1) for b, size in zip(biases, sizes, strict=True)])
        self._found.append(
            (list(places), sizes, wrong_tokens(routers[0], logits_nE, gates_nE, used_nE, is_live_n, bias_nE))
        )


WRONG = (
    "the gates are not the live router's scores at the experts that it used",
    "a token does not go to top-k different experts",
    "a token that is routed live does not go to the experts with the best scores",
)
"""Error messages for the rows of `wrong_tokens`."""


def wrong_tokens(
    router: TopKRouter, logits_nE: Tensor, gates_nE: Tensor, used_nE: Tensor, is_live_n: Tensor, bias_nE: Tensor | None
) -> Tensor:
    """Mask `[3, n]`: True where a token's gates, number of experts, or live choice (the order of WRONG) are wrong;
    never True if its logits are not finite. All tokens come from routers of `router`'s kind; `bias_nE` is their expert
    bias, if any.
    """
    has_capacity = router.config.moe_expert_capacity_factor is not None
    expected_nE, given_nE = definition_of_gates(router, logits_nE, used_nE), gates_nE.float()
    if has_capacity:
        # A dropped choice counts in the sum, but is not in the map: only ratios of the remaining gates are known.
        expected_nE, given_nE = _as_shares(expected_nE), _as_shares(given_nE)
    scale = router.config.moe_router_topk_scaling_factor or 1.0
    # "not <=" makes a NaN wrong.
    is_wrong_gate_n = ~((given_nE - expected_nE).abs().amax(1) <= GATE_TOLERANCE * max(1.0, scale))
    count_n = used_nE.sum(1)
    is_wrong_count_n = (count_n > router.topk) | ((count_n < router.topk) & (not has_capacity))
    scores_nE = _scores_of_choice(router, logits_nE, bias_nE)
    best_nK = _best_scores(router, scores_nE)
    slack_n = 1e-6 + 1e-5 * best_nK.abs().amax(1)
    if has_capacity:
        # Some of the best experts had no room. The used experts must still be among the best.
        worst_n = scores_nE.masked_fill(~used_nE, torch.inf).amin(1)
        is_best_n = worst_n >= best_nK.amin(1) - slack_n
    else:
        # Compare sums: among experts with equal scores any choice is right.
        sum_n = (scores_nE * used_nE).sum(1)
        is_best_n = (sum_n - best_nK.sum(1)).abs() <= slack_n
    found_3n = torch.stack([is_wrong_gate_n, is_wrong_count_n, ~is_best_n & is_live_n])
    # An overflow before the router is not an error of its gates: the step is skipped, and train.max_skipped applies.
    return found_3n & logits_nE.isfinite().all(1)


def definition_of_gates(router: TopKRouter, logits_nE: Tensor, used_nE: Tensor) -> Tensor:
    """Return the gates, float32 `[n, E]`, that the router's definition gives for these logits and used experts."""
    logits_nE = logits_nE.float()
    if router.score_function == "softmax":
        if router.config.moe_router_pre_softmax:
            gates_nE = logits_nE.softmax(1) * used_nE
        else:
            # If all choices of a token are dropped, its gates are 0.
            gates_nE = logits_nE.masked_fill(~used_nE, -torch.inf).softmax(1).nan_to_num(0.0)
    else:
        assert router.score_function == "sigmoid", router.score_function
        gates_nE = logits_nE.sigmoid() * used_nE
        if router.topk > 1:
            gates_nE = gates_nE / (gates_nE.sum(1, keepdim=True) + 1e-20)
    return gates_nE * (router.config.moe_router_topk_scaling_factor or 1.0)


def labels_at_routers(layout: MicrobatchLayout, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return sample index and position of each token that this rank's routers see, int64 `[t]` on the CPU; -1 for
    padding.

    This is a formula for the t-th token, whereas layouts.local_tokens slices whole tensors: each detects mistakes in
    the other. A router sees `[s, B]` with B fastest; sequence parallelism gives it a contiguous part of s. Context
    parallelism gives rank r of C the pieces r and 2 C - 1 - r of the 2 C pieces of each span.
    """
    spans = [span for span in layout.spans if span.num_positions]
    num_rows = 1 if layout.packed else len(layout.rows)
    size, rank = mesh.cp.size, mesh.cp.rank
    here_N = torch.tensor([span.num_positions // size for span in spans])
    parts, part = (mesh.tp.size, mesh.tp.rank) if mesh.sequence_parallel else (1, 0)
    part_length = int(here_N.sum()) // num_rows // parts
    token_t = torch.arange(part_length * num_rows)
    place_t = token_t // num_rows + part * part_length
    if layout.packed:
        end_N = here_N.cumsum(0)
        span_t = torch.searchsorted(end_N, place_t, right=True)
        place_t = place_t - (end_N - here_N)[span_t]
    else:
        span_t = token_t % num_rows
    if size > 1:
        # On this rank the second piece, 2 C - 1 - r, directly follows the first: it begins at offset `piece_t`.
        piece_t = here_N[span_t] // 2
        place_t = place_t + piece_t * torch.where(place_t < piece_t, rank, 2 * size - 2 - rank)
    num_tokens_N = torch.tensor([span.num_tokens if span.sample >= 0 else 0 for span in spans])
    is_token_t = place_t < num_tokens_N[span_t]
    place_t = place_t + torch.tensor([span.first_position for span in spans])[span_t]
    samples = list(layout.num_tokens)
    index_N = torch.tensor([samples.index(span.sample) if span.sample >= 0 else -1 for span in spans])
    return index_N[span_t].where(is_token_t, -1), place_t.where(is_token_t, -1)


@dataclass(slots=True)
class WitnessedMicrobatch:
    """One microbatch as its tokens arrive at this rank's routers."""

    samples: tuple[int, ...]
    sample_index_t: Tensor
    """Index into `samples` of each token, on the CPU; -1 for padding."""
    position_t: Tensor
    is_counted_t: Tensor
    """Mask of the tokens in the checksums, on the CPU: all, or the tokens with imposed routes."""
    row_n: Tensor
    """Indices of the sampled tokens, on the device."""
    is_live_n: bool | Tensor
    """Whether the sampled tokens are routed live, for all of them or as a mask."""
    target_t: Tensor | None = None
    """`sample_index_t` on the device, 0 for padding; None before a chunk has received the token ids."""
    token_hashes_t: Tensor | None = None
    used: dict[int, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    """Layer -> checksums `[N]` of the used experts, for each call in the forward pass and in recomputation."""


class Witness:
    """Observer of the routers in one pass with a tape; it changes nothing."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        layouts: Sequence[MicrobatchLayout],
        layers: Sequence[int],
        num_experts: int,
        missing_positions: Callable[[int, int], Tensor],
        seed: int,
        *,
        is_imposed: bool,
    ) -> None:
        """Prepare to observe a pass over this rank's `layers` with routers. `missing_positions(sample, num_tokens)`
        returns the positions without routes, which must be routed live; unless `is_imposed`, all must be. `seed`
        selects the sampled tokens.
        """
        self._chunks, self._mesh, self._layers = chunks, mesh, tuple(layers)
        self._device = next(chunks[0].parameters()).device
        self._is_imposed, self._missing_positions = is_imposed, missing_positions
        self._microbatches = [self._prepared(layout, seed + index) for index, layout in enumerate(layouts)]
        hashes_lE = expert_hashes(self._layers, num_experts, self._device)
        self._expert_hashes = dict(zip(self._layers, hashes_lE, strict=True))
        self._tokens = SampledTokens()
        # Every microbatch with tokens gets its turn: always checking the same would miss errors in the rest.
        with_tokens = [index for index, microbatch in enumerate(self._microbatches) if len(microbatch.row_n)]
        self._differentiated = {
            layer: with_tokens[(seed + layer) % len(with_tokens)] for layer in layers if with_tokens
        }
        self._derivatives: dict[int, Tensor] = {}
        self._without_gradient: set[int] = set()
        self._watch = RouterWatch(self._on_router_of)
        self._in_forward: dict[nn.Module, int] = {}
        self._in_backward: dict[nn.Module, int] = {}
        self._hooks = ExitStack()

    def install(self) -> None:
        """Start observing; call this after installing all hooks that change a router's output."""
        for chunk in self._chunks:
            self._hooks.callback(chunk.register_forward_pre_hook(self._on_input, with_kwargs=True).remove)
            self._hooks.callback(chunk.register_forward_hook(self._on_output).remove)
        self._watch.install(self._chunks)
        self._hooks.callback(self._watch.remove)

    def remove(self) -> None:
        """Stop observing."""
        self._hooks.close()
        self._in_forward.clear()
        self._in_backward.clear()

    def around(self, routing: Routing) -> Routing:
        """Wrap `routing` to track which microbatch each chunk is running."""

        @contextmanager
        def watched(chunk: nn.Module, index: int) -> Iterator[None]:
            self._in_forward[chunk] = index
            try:
                with routing(chunk, index):
                    yield
            finally:
                self._in_forward.pop(chunk, None)

        return watched

    def num_calls(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return (layer, microbatch) -> number of calls of its router, in the forward pass and in recomputation."""
        nothing: tuple[list[Tensor], list[Tensor]] = ([], [])
        calls = {
            (layer, index): microbatch.used.get(layer, nothing)
            for index, microbatch in enumerate(self._microbatches)
            for layer in self._layers
        }
        return {key: (len(forward), len(recomputed)) for key, (forward, recomputed) in calls.items()}

    def checksums(self) -> list[Tensor]:
        """Return for each microbatch the checksums of this rank's part of its samples, `[N, l]`; 0 without a call."""
        return [self._checksums(microbatch) for microbatch in self._microbatches]

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each problem on this rank. Waits for the device."""
        for layer in sorted(self._without_gradient):
            yield f"layer {layer}: the gates have no gradient to the router's logits, so that it would not learn"
        if self._derivatives:
            errors = dict(zip(self._derivatives, torch.stack([*self._derivatives.values()]).tolist(), strict=True))
            for layer, error in errors.items():
                if not error <= DERIVATIVE_TOLERANCE:
                    yield (
                        f"layer {layer}: the derivative of the gates by the router's logits is off by {error:.2g}, so "
                        "that the router would not learn from the gates that experts get"
                    )
        yield from self._tokens.problems()
        if self._is_imposed:
            yield from self._recomputed_otherwise()

    def _prepared(self, layout: MicrobatchLayout, seed: int) -> WitnessedMicrobatch:
        sample_index_t, position_t = labels_at_routers(layout, self._mesh)
        is_counted_t = sample_index_t >= 0
        row_n = _some(is_counted_t.nonzero()[:, 0], seed)
        is_live_n: bool | Tensor = not self._is_imposed
        if self._is_imposed:
            is_missing_t = torch.zeros_like(is_counted_t)
            for index, (sample, num_tokens) in enumerate(layout.num_tokens.items()):
                missing_n = self._missing_positions(sample, num_tokens)
                if len(missing_n):
                    is_missing_t |= (sample_index_t == index) & torch.isin(position_t, missing_n)
            if is_missing_t.any():
                is_counted_t = is_counted_t & ~is_missing_t
                # No checksum covers these tokens, so all of them are compared.
                row_n = torch.cat([_some(is_counted_t.nonzero()[:, 0], seed), is_missing_t.nonzero()[:, 0]])
                is_live_n = to_device(is_missing_t[row_n], self._device)
        sampled_n = to_device(row_n, self._device)
        samples = tuple(layout.num_tokens)
        return WitnessedMicrobatch(samples, sample_index_t, position_t, is_counted_t, sampled_n, is_live_n)

    def _on_input(self, chunk: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if chunk not in self._in_forward:
            return  # the routers will refuse to answer
        microbatch = self._microbatches[self._in_forward[chunk]]
        if microbatch.token_hashes_t is not None:
            return
        ids_sB = kwargs["input_ids"].t()
        if self._mesh.sequence_parallel:
            length = len(ids_sB) // self._mesh.tp.size
            ids_sB = ids_sB.narrow(0, length * self._mesh.tp.rank, length)
        index_t, position_t, is_counted_t = (
            to_device(labels_t, self._device)
            for labels_t in (microbatch.sample_index_t, microbatch.position_t, microbatch.is_counted_t)
        )
        microbatch.token_hashes_t = token_hashes(ids_sB.reshape(-1), position_t, is_counted_t)
        microbatch.target_t = index_t.clamp_min(0)

    def _on_output(self, chunk: nn.Module, args: Any, output: Logits) -> None:
        index = self._in_forward.get(chunk)
        if index is not None and last_tensor(output).requires_grad:
            # The gradient of the output arrives before any recomputation of this microbatch.
            last_tensor(output).register_hook(lambda _: self._in_backward.__setitem__(chunk, index))

    def _on_router_of(self, chunk: nn.Module) -> OnCall:
        def on_call(layer: int, router: TopKRouter, logits: Tensor, gates_TE: Tensor, used_TE: Tensor) -> None:
            is_forward = chunk in self._in_forward
            index = (self._in_forward if is_forward else self._in_backward).get(chunk)
            assert index is not None, f"the router of layer {layer} was used outside of the passes of its tape"
            microbatch = self._microbatches[index]
            logits_TE = logits.view(-1, logits.shape[-1])
            calls = microbatch.used.setdefault(layer, ([], []))
            calls[0 if is_forward else 1].append(self._used_checksums(layer, microbatch, used_TE.detach()))
            again = "" if is_forward else " in recomputation"
            where = f"layer {layer}, microbatch {index} (samples {list(microbatch.samples)}){again}"
            if len(microbatch.row_n):
                rows = (microbatch.row_n, microbatch.is_live_n)
                self._tokens.add(where, router, logits_TE, gates_TE, used_TE, *rows)
            if logits.requires_grad and torch.is_grad_enabled():
                if not gates_TE.requires_grad:
                    self._without_gradient.add(layer)
                elif index == self._differentiated.get(layer):
                    self._add_derivative(layer, router, logits, gates_TE, used_TE, microbatch.row_n[:SAMPLED_TOKENS])

        return on_call

    def _used_checksums(self, layer: int, microbatch: WitnessedMicrobatch, used_TE: Tensor) -> Tensor:
        assert microbatch.token_hashes_t is not None and microbatch.target_t is not None
        # -1 & hash is the hash, 0 & hash is 0: multiplying bool by int64 takes ten times as long.
        hashes_TE = used_TE.long().neg_() & self._expert_hashes[layer]
        hashes_t: Tensor = hashes_TE.sum(1) * microbatch.token_hashes_t
        sums_N = hashes_t.new_zeros(max(1, len(microbatch.samples)))
        return sums_N.index_add_(0, microbatch.target_t, hashes_t)[: len(microbatch.samples)]

    def _add_derivative(
        self, layer: int, router: TopKRouter, logits: Tensor, gates_TE: Tensor, used_TE: Tensor, row_n: Tensor
    ) -> None:
        # Any direction that is not constant will do: the gates of a token sum to a constant.
        number_n = torch.arange(len(row_n) * gates_TE.shape[1], device=gates_TE.device)
        direction_nE = (12.9898 * number_n).sin().view(len(row_n), -1)
        direction_TE = torch.zeros_like(gates_TE).index_copy_(0, row_n, direction_nE.to(gates_TE.dtype))
        forth, back = (
            torch.autograd.grad(gates_TE, logits, sign * direction_TE, retain_graph=True, allow_unused=True)[0]
            for sign in (1, -1)
        )
        if forth is None or back is None:
            self._without_gradient.add(layer)
            return
        # A balance loss is attached to the gates and adds the same gradient both times: the difference cancels it.
        found_nE = (forth - back).view(gates_TE.shape)[row_n].float() / 2
        if router.config.moe_expert_capacity_factor is not None:
            # The effect of a dropped choice on the remaining gates is unknown: check only that a gradient exists.
            has_two = (used_TE[row_n].sum(1) > 1).any()
            error = (has_two & ~found_nE.any()).float()
        else:
            with torch.enable_grad():
                leaf_nE = logits.detach().view(gates_TE.shape)[row_n].requires_grad_()
                expected = (definition_of_gates(router, leaf_nE, used_TE[row_n]) * direction_nE).sum()
            (expected_nE,) = torch.autograd.grad(expected, leaf_nE)
            is_finite_n1 = leaf_nE.detach().isfinite().all(1, keepdim=True)
            error = (found_nE - expected_nE).abs().where(is_finite_n1, 0.0).amax()
        self._derivatives[layer] = error.detach()

    def _checksums(self, microbatch: WitnessedMicrobatch, kind: int = 0) -> Tensor:
        zeros_N = torch.zeros(len(microbatch.samples), dtype=torch.int64, device=self._device)
        if not self._layers:
            return zeros_N[:, None][:, :0]
        columns = []
        for layer in self._layers:
            calls = microbatch.used.get(layer, ([], []))[kind]
            columns.append(calls[0] if calls else zeros_N)
        return torch.stack(columns, 1)

    def _recomputed_otherwise(self) -> Iterator[str]:
        """Yield a sentence for each router that used different experts in recomputation than in the forward pass."""
        for index, microbatch in enumerate(self._microbatches):
            again = [layer for layer in self._layers if microbatch.used.get(layer, ([], []))[1]]
            columns = [self._layers.index(layer) for layer in again]
            if not again or not microbatch.samples:
                continue
            first_Nl, second_Nl = (self._checksums(microbatch, kind)[:, columns] for kind in (0, 1))
            for row, sample in enumerate(microbatch.samples):
                is_other_l = (first_Nl[row] != second_Nl[row]).tolist()
                if not any(is_other_l):
                    continue
                layers = [layer for layer, is_other in zip(again, is_other_l, strict=True) if is_other]
                yield (
                    f"layer {layers[0]}, microbatch {index} (samples {list(microbatch.samples)}): sample {sample} used "
                    f"other experts in recomputation than in the forward pass (layers {layers})"
                )


@contextmanager
def proving(chunks: Sequence[nn.Module], *, is_imposed: bool) -> Iterator[None]:
    """Context for a pass; collective over the world on exit: check that the pass imposed routes on every router, or on
    none. Without a tape, a few tokens of each call must go to the experts with the best scores. Raises RoutingError on
    all ranks.
    """
    wrong_layers: set[int] = set()
    tokens = SampledTokens()

    def on_call(layer: int, router: TopKRouter, logits: Tensor, gates_TE: Tensor, used_TE: Tensor) -> None:
        hook = router.router_replay
        if (hook is not None and hook.imposes) != is_imposed:
            wrong_layers.add(layer)
        elif hook is None:
            row_n = _some(torch.arange(len(used_TE), device=used_TE.device), layer)
            logits_TE = logits.view(-1, logits.shape[-1])
            tokens.add(f"layer {layer}", router, logits_TE, gates_TE, used_TE, row_n, True)

    watch = RouterWatch(lambda _: on_call)
    watch.install(chunks)
    try:
        yield
    finally:
        watch.remove()
    problems = [*tokens.problems()]
    if wrong_layers:
        problems.append(
            f"layers {sorted(wrong_layers)}: "
            + ("a pass under replayed routes was routed live" if is_imposed else "routes were imposed on a live pass")
        )
    refuse_anywhere(problems, RoutingError)


def _some(index_n: Tensor, seed: int) -> Tensor:
    """Return at most SAMPLED_TOKENS of the given indices, evenly spread; the selection depends on the seed."""
    if count := min(SAMPLED_TOKENS, len(index_n)):
        places = torch.arange(count, device=index_n.device) * len(index_n) // count
        index_n = index_n[(places + seed * 7919) % len(index_n)]
    return index_n


def _as_shares(gates_nE: Tensor) -> Tensor:
    return gates_nE / gates_nE.sum(1, keepdim=True).clamp_min(1e-20)


def _scores_of_choice(router: TopKRouter, logits_nE: Tensor, bias_nE: Tensor | None) -> Tensor:
    logits_nE = logits_nE.float()
    if router.score_function == "softmax":
        return logits_nE.softmax(1) if router.config.moe_router_pre_softmax else logits_nE
    scores_nE = logits_nE.sigmoid()
    return scores_nE if bias_nE is None else scores_nE + bias_nE


def _best_scores(router: TopKRouter, scores_nE: Tensor) -> Tensor:
    """Return the scores `[n, K]` of the experts that a live router would choose."""
    config, top_groups = router.config, router.config.moe_router_group_topk
    if not top_groups:
        return scores_nE.topk(router.topk).values
    return best_in_groups(
        scores_nE,
        router.topk,
        num_groups=config.moe_router_num_groups,
        top_groups=top_groups,
        experts_in_score=own_group_score(config) or router.topk // top_groups,
    )[0]
