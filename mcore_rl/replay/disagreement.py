"""How far the engine's routes may be unlike those that the trainer chooses, and how far they must be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.replay.accounts import RouteTotals

FIRST_LIMIT, FIRST_LIMIT_OF_ONE = 0.03, 0.1
"""Limit of the first pass that is measured, with several experts a token and with one: rounding exchanges single
experts. Of two experts a token both are others in 0.3 % of the choices where rounding changes 12 % of them."""
LOWEST_LIMIT = 0.01
"""Least limit that is measured; the largest, and the limit of a sample, are twice the first."""
MEASURED_TOKENS = 1000
"""Fewest tokens of a layer from which a limit is measured; passes of fewer are held to the first limit."""
TIMES_FIRST = 3.0
DEVIATIONS = 4.0
"""Standard deviations of a share that chance may add to its limit."""
FEW_TOKENS = 5
"""Tokens of a layer that are no disagreement, however few were compared."""
MOST_MISSED = 0.7
"""Largest share of the trainer's choices of an expert, where it is no rare expert, in which the engine has others."""
FEW_CHOICES = 100
"""Fewest choices of an expert for it to be judged, if they are also a quarter of its even share."""
CHANGED_PER_NAT = 0.02
"""Share of choices that changes at least where the logprobs of tokens change by 1 nat on average. The models of
docs/replay.md have 0.12 to 0.17, deep ones more."""


class DisagreementLimit:
    """Limit on the share of a layer's tokens whose live choice has no expert in common with the engine's.

    Engines have returned plausible routes that were of other tokens, or one stale row for a whole chunk of a prompt.
    Such a token shares its experts with the trainer's choice by chance only, whereas different rounding exchanges one
    expert for the next best.
    """

    def __init__(self, config: ReplayConfig, top_k: int, measured_L: list[float]) -> None:
        """Measure the first pass within the first limit for the limits of those that follow, if they are "auto".

        Args:
            config: the settings of replay.
            top_k: experts of a token.
            measured_L: limit of each layer that an earlier start of the run has measured; empty: they are measured
                here, and put there.
        """
        self._config = config
        self._first = FIRST_LIMIT if top_k > 1 else FIRST_LIMIT_OF_ONE
        self._measured_L = measured_L

    def problem(self, totals: RouteTotals) -> str | None:
        """Return a sentence if a layer is above its limit in a pass with the weights that the engine had."""
        setting = self._config.max_disagreement
        if setting is None:
            return None
        shares_L = [
            disjoint / max(1.0, current)
            for disjoint, current in zip(totals.disjoint_L, totals.current_L, strict=True)
        ]
        if setting != "auto":
            limits_L: Sequence[float] = [setting] * len(shares_L)
        else:
            limits_L = self._measured_L or [self._first] * len(shares_L)
        above = [
            f"layer {layer}: {share:.1%} of {current:.0f} tokens (limit {limit:.1%})"
            for layer, (share, limit, disjoint, current) in enumerate(
                zip(shares_L, limits_L, totals.disjoint_L, totals.current_L, strict=True)
            )
            if share > limit and disjoint > FEW_TOKENS
        ]
        if not above and (exchanged := exchanged_experts(totals)):
            return exchanged
        if not above:
            if setting == "auto" and not self._measured_L and _has_enough(totals):
                # Not of a pass above the first limit: what is wrong there would be allowed from then on.
                self._measured_L += [
                    min(max(LOWEST_LIMIT, TIMES_FIRST * share), 2 * self._first) for share in shares_L
                ]
            return None
        return (
            "the rollout engine's routes have no expert in common with those that the trainer chooses with the same "
            f"weights: {'; '.join(above)}. They are probably not the routes of these tokens, or the engine has other "
            "weights. Look at rollout_routes/* in the report; replay.max_disagreement is the limit."
        )

    def problems_of_samples(self, disjoint_by_sample: Mapping[int, tuple[int, int]]) -> dict[int, str]:
        """Return a sentence for each sample whose routes are probably not its own, though few of a batch are no large
        share of a layer's tokens: those of another request, shifted, or of a stale block of the engine's cache.

        Args:
            disjoint_by_sample: sample -> choices (token, layer) without an expert in common, and compared choices.
        """
        setting = self._config.max_disagreement
        if setting is None:
            return {}
        found = {}
        limit = 2 * self._first if setting == "auto" else max(2 * self._first, setting)
        for sample, (disjoint, compared) in disjoint_by_sample.items():
            by_chance = DEVIATIONS * math.sqrt(limit * (1 - limit) * compared)
            if disjoint > limit * compared + by_chance + FEW_TOKENS:
                found[sample] = (
                    f"sample {sample}: {disjoint / compared:.0%} of its {compared} choices (token, layer) have no "
                    "expert in common with those that the trainer makes with the same weights (limit "
                    f"{limit:.0%} and what chance adds): the rollout engine's routes are probably not of this "
                    "completion. Look at the engine's log and caches; replay.max_disagreement is the limit"
                )
        return found


def exchanged_experts(totals: RouteTotals) -> str | None:
    """Return a sentence where the engine has others for some experts that the trainer chooses with the same weights.

    Routes in which a few experts have each other's numbers, as after a load balancer has moved them, differ from the
    trainer's by one expert of a token at a time, as those that rounding has changed do. But it is always the same.
    """
    chosen_LE, missed_LE = totals.expert_choices_2LE
    is_frequent_LE = chosen_LE >= (chosen_LE.mean(1, keepdim=True) / 4).clamp_min(FEW_CHOICES)
    by_chance_LE = DEVIATIONS * (MOST_MISSED * (1 - MOST_MISSED) * chosen_LE).sqrt()
    is_wrong_LE = is_frequent_LE & (missed_LE > MOST_MISSED * chosen_LE + by_chance_LE)
    wrong = [
        f"layer {layer}: experts {is_wrong_E.nonzero()[:, 0].tolist()}"
        for layer, is_wrong_E in enumerate(is_wrong_LE)
        if is_wrong_E.any()
    ]
    if not wrong:
        return None
    return (
        "the rollout engine's routes nearly always have others in the place of some experts that the trainer chooses "
        f"with the same weights: {'; '.join(wrong)}. The engine probably numbers its experts otherwise, as load "
        'balancing of experts does. Switch it off, or set replay.max_disagreement="none" to train all the same.'
    )


class StaleRoutes:
    """Sums over rollout batches that show whether the routes of tokens which older weights sampled are theirs.

    A server that computes such tokens again for itself returns the routes of its present weights, with the logprobs of
    the older ones. It can be seen where logprobs differ from the trainer's by the updates in between, and routes do
    not: they agree with the trainer's as well as those of tokens that the present weights sampled. Of a policy that has
    hardly moved, and of few tokens, nothing can be said.
    """

    def __init__(self, top_k: int) -> None:
        """Begin with no tokens; `top_k`: experts of a token."""
        self._top_k = top_k
        self._stale, self._current = _Agreement(), _Agreement()
        self._is_reported = False

    def add_routes(self, totals: RouteTotals) -> None:
        """Add a pass with the present weights in which the engine's routes were compared with the live choice."""
        changed, current_changed = sum(totals.changed_L), sum(totals.current_changed_L)
        compared, current = sum(totals.compared_L), sum(totals.current_L)
        current_tokens = max(totals.current_L, default=0.0)
        self._current.add_routes(current_changed, current * self._top_k, current_tokens)
        self._stale.add_routes(
            changed - current_changed,
            (compared - current) * self._top_k,
            totals.compared_tokens - current_tokens,
        )

    def add_logprobs(self, sums: Mapping[str, float]) -> None:
        """Add the statistics of an update (`update_statistics`), where the trainer's logprobs of the tokens that it
        trained on were compared with those of the engine.
        """
        if "stale" not in sums:
            return
        current = sums["mismatch_abs_current"]
        self._stale.add_logprobs(sums["mismatch_abs"] - current, sums["stale"])
        self._current.add_logprobs(current, sums["count"] - sums["stale"])

    def warning(self) -> str | None:
        """Return a warning once the routes of older tokens are known to be of the present weights; once."""
        stale, current = self._stale, self._current
        if self._is_reported or min(one.num_tokens for one in (stale, current)) < MEASURED_TOKENS:
            return None
        if not (stale.num_logprobs and current.num_logprobs):
            return None
        moved_nats = stale.difference_nats - current.difference_nats
        least_changed = CHANGED_PER_NAT * moved_nats
        # Where rounding changes most routes, those of prompts and of long completions may differ by as much.
        if least_changed <= current.changed_share / 10:
            return None
        # The choices of one token, in its layers, are not independent: what chance adds is counted by tokens.
        by_chance = DEVIATIONS * math.sqrt(stale.variance + current.variance)
        if stale.changed_share - current.changed_share + by_chance >= least_changed:
            return None
        self._is_reported = True
        return (
            f"warning: the engine's routes of {stale.num_tokens:.0f} tokens that older weights sampled agree with the "
            f"present weights' ({stale.changed_share:.2%} of the choices differ, and {current.changed_share:.2%} of "
            "those of tokens that the present weights sampled), though their logprobs have changed by "
            f"{moved_nats:.2g} nats a token. Likely reason: after an update the engine computed these tokens again and "
            "returns the routes of then, without saying so: R3 trains older tokens under newer weights' routes. "
            'Set rl.rollout.max_staleness=0, or replay.kind="r2". It is no fault where only layers behind the last '
            "router are trained."
        )


@dataclass(slots=True)
class _Agreement:
    """Sums over tokens of one age: choices of the engine and the trainer, and their logprobs."""

    changed: float = 0.0
    choices: float = 0.0
    num_tokens: float = 0.0
    difference: float = 0.0
    num_logprobs: float = 0.0

    def add_routes(self, changed: float, choices: float, num_tokens: float) -> None:
        self.changed += changed
        self.choices += choices
        self.num_tokens += num_tokens

    def add_logprobs(self, difference: float, num_logprobs: float) -> None:
        self.difference += difference
        self.num_logprobs += num_logprobs

    @property
    def changed_share(self) -> float:
        return self.changed / self.choices

    @property
    def difference_nats(self) -> float:
        return self.difference / self.num_logprobs

    @property
    def variance(self) -> float:
        """Variance of the share; of none that changed, as if one choice of each layer of a token had."""
        return max(self.changed_share, 1.0 / self.num_tokens) / self.num_tokens


def _has_enough(totals: RouteTotals) -> bool:
    """Return whether each layer with routers has enough tokens to measure a limit; of a few, chance makes any share."""
    counts = [
        current for compared, current in zip(totals.compared_L, totals.current_L, strict=True) if compared
    ]
    return bool(counts) and min(counts) >= MEASURED_TOKENS
