"""Checks that a rollout engine's routes differ from the trainer's as much as they should, and no more."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.replay.accounts import RouteTotals

FIRST_LIMIT, FIRST_LIMIT_OF_ONE = 0.03, 0.1
"""Limit for the first measured pass, with several experts per token and with a single expert. Rounding usually swaps
a single expert: with two experts per token, when rounding changes 12 % of the choices, both experts differ in 0.3 %."""
LOWEST_LIMIT = 0.01
"""Smallest measured limit; the largest, which is also the limit of a sample, is twice the first limit."""
MEASURED_TOKENS = 1000
"""Fewest tokens per layer from which a limit is measured; smaller passes are held to the first limit."""
TIMES_FIRST = 3.0
DEVIATIONS = 4.0
"""Number of standard deviations by which chance may exceed a limit."""
FEW_TOKENS = 5
"""Disjoint tokens that a layer may always have, however few tokens were compared."""
MOST_MISSED = 0.7
"""Largest share of the trainer's choices of a frequent expert that the engine may miss."""
FEW_CHOICES = 100
"""An expert is frequent from this many choices, if they are also a quarter of an even share."""
CHANGED_PER_NAT = 0.02
"""Smallest expected share of changed choices if logprobs change by 1 nat per token on average. The models in
docs/replay.md have 0.12 to 0.17, deep models more."""


class DisagreementLimit:
    """Limit on the share of a layer's tokens for which trainer and engine have no expert in common. Routes of other
    tokens match only by chance, whereas a rounding difference swaps one expert for the next best.
    """

    def __init__(self, config: ReplayConfig, top_k: int, measured_L: list[float]) -> None:
        """Create the limit. If it is "auto", the first pass within the first limit sets the limits of later passes.
        `measured_L` has each layer's limit from an earlier start of the run; if empty, it is filled in place.
        """
        self._config = config
        self._first = FIRST_LIMIT if top_k > 1 else FIRST_LIMIT_OF_ONE
        self._measured_L = measured_L

    def problem(self, totals: RouteTotals) -> str | None:
        """Return an error message if a layer exceeds its limit in a pass with the engine's weights, else None."""
        setting = self._config.max_disagreement
        if setting is None:
            return None
        shares_L = [
            disjoint / max(1.0, current) for disjoint, current in zip(totals.disjoint_L, totals.current_L, strict=True)
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
        if above:
            return (
                "the rollout engine's routes have no expert in common with those that the trainer chooses with the "
                f"same weights: {'; '.join(above)}. They are probably not the routes of these tokens, or the engine "
                "has other weights. Look at rollout_routes/* in the report; replay.max_disagreement is the limit."
            )
        if exchanged := exchanged_experts(totals):
            return exchanged
        # With few tokens in a layer with routers any share is chance. A pass above the first limit is not measured
        # either: its error would be allowed from then on.
        counts = [current for compared, current in zip(totals.compared_L, totals.current_L, strict=True) if compared]
        if setting == "auto" and not self._measured_L and min(counts, default=0) >= MEASURED_TOKENS:
            self._measured_L += [min(max(LOWEST_LIMIT, TIMES_FIRST * share), 2 * self._first) for share in shares_L]
        return None

    def problems_of_samples(self, disjoint_by_sample: Mapping[int, tuple[int, int]]) -> dict[int, str]:
        """Return an error message for each sample that probably has wrong routes; a few such samples stay below a
        layer's limit. `disjoint_by_sample` has each sample's choices (token, layer) without a common expert, and
        compared choices.
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
    """Return an error message if the engine seems to number some experts differently from the trainer, else None.
    Routes then differ by one expert per token, as after rounding, but always by the same expert.
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
    """Sums over rollout batches that detect routes which do not belong to the older weights that sampled the tokens.

    A server that recomputes such tokens returns its present weights' routes with the older weights' logprobs: only the
    logprobs then differ from the trainer's more than those of newly sampled tokens do.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._stale, self._current = _Agreement(), _Agreement()
        self._is_reported = False

    def add_routes(self, totals: RouteTotals) -> None:
        """Add a pass with the present weights that compared the engine's routes with the live choice."""
        changed, current_changed = sum(totals.changed_L), sum(totals.current_changed_L)
        compared, current = sum(totals.compared_L), sum(totals.current_L)
        current_tokens = max(totals.current_L, default=0.0)
        self._current.add_routes(current_changed, current * self._top_k, current_tokens)
        self._stale.add_routes(
            changed - current_changed, (compared - current) * self._top_k, totals.compared_tokens - current_tokens
        )

    def add_logprobs(self, sums: Mapping[str, float]) -> None:
        """Add the statistics of an update (`update_statistics`) that compared trainer and engine logprobs."""
        if "stale" not in sums:
            return
        current = sums["mismatch_abs_current"]
        self._stale.add_logprobs(sums["mismatch_abs"] - current, sums["stale"])
        self._current.add_logprobs(current, sums["count"] - sums["stale"])

    def warning(self) -> str | None:
        """Return a warning, at most once, when the routes of older tokens prove to be the present weights'."""
        stale, current = self._stale, self._current
        if self._is_reported or min(stale.num_tokens, current.num_tokens) < MEASURED_TOKENS:
            return None
        if not (stale.num_logprobs and current.num_logprobs):
            return None
        moved_nats = stale.difference_nats - current.difference_nats
        least_changed = CHANGED_PER_NAT * moved_nats
        # If rounding changes most routes, prompts and long completions may differ by this much anyway.
        if least_changed <= current.changed_share / 10:
            return None
        # A token's choices in its layers are not independent: the deviation is computed from the number of tokens.
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
    """Sums over tokens of the same age: how engine and trainer differ in choices and logprobs."""

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
        """Variance of `changed_share`; if it is 0, computed as if the choices of one token had changed."""
        return max(self.changed_share, 1.0 / self.num_tokens) / self.num_tokens
