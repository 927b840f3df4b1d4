"""The limit on how many of the engine's routes may be unlike those that the trainer chooses with the same weights."""

import math
from collections.abc import Iterator, Mapping, Sequence

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.replay.accounts import RouteTotals

FIRST_LIMIT = 0.1
"""Limit of the first pass that is measured."""
LOWEST_LIMIT, HIGHEST_LIMIT = 0.01, 0.2
"""Least and largest limit that is measured."""
MEASURED_TOKENS = 1000
"""Fewest tokens of a layer from which a limit is measured; passes of fewer are held to the first limit."""
TIMES_FIRST = 3.0
DEVIATIONS = 4.0
"""Standard deviations of a sample's share that chance may add to its limit."""
FEW_TOKENS = 5
"""Tokens of a layer that are no disagreement, however few were compared."""


class DisagreementLimit:
    """Limit on the share of a layer's tokens whose live choice has no expert in common with the engine's.

    Engines have returned plausible routes that were of other tokens, or one stale row for a whole chunk of a prompt.
    Such a token shares its experts with the trainer's choice by chance only, whereas different rounding exchanges one
    expert for the next best.
    """

    def __init__(self, config: ReplayConfig, measured_L: list[float]) -> None:
        """Measure the first pass within the first limit for the limits of those that follow, if they are "auto".

        Args:
            config: the settings of replay.
            measured_L: limit of each layer that an earlier start of the run has measured; empty: they are measured
                here, and put there.
        """
        self._config = config
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
            limits_L = self._measured_L or [FIRST_LIMIT] * len(shares_L)
        above = [
            f"layer {layer}: {share:.1%} of {current:.0f} tokens (limit {limit:.1%})"
            for layer, (share, limit, disjoint, current) in enumerate(
                zip(shares_L, limits_L, totals.disjoint_L, totals.current_L, strict=True)
            )
            if share > limit and disjoint > FEW_TOKENS
        ]
        if not above:
            if setting == "auto" and not self._measured_L and _has_enough(totals):
                # Not of a pass above the first limit: what is wrong there would be allowed from then on.
                self._measured_L += [
                    min(max(LOWEST_LIMIT, TIMES_FIRST * share), HIGHEST_LIMIT) for share in shares_L
                ]
            return None
        return (
            "the rollout engine's routes have no expert in common with those that the trainer chooses with the same "
            f"weights: {'; '.join(above)}. They are probably not the routes of these tokens, or the engine has other "
            "weights. Look at rollout_routes/* in the report; replay.max_disagreement is the limit."
        )

    def problems_of_samples(self, disjoint_by_sample: Mapping[int, tuple[int, int]]) -> Iterator[str]:
        """Yield a sentence for each sample whose routes are probably not its own, though few of a batch are no large
        share of a layer's tokens: those of another request, shifted, or of a stale block of the engine's cache.

        Args:
            disjoint_by_sample: sample -> choices (token, layer) without an expert in common, and compared choices.
        """
        setting = self._config.max_disagreement
        if setting is None:
            return
        limit = HIGHEST_LIMIT if setting == "auto" else max(HIGHEST_LIMIT, setting)
        for sample, (disjoint, compared) in disjoint_by_sample.items():
            by_chance = DEVIATIONS * math.sqrt(limit * (1 - limit) * compared)
            if disjoint > limit * compared + by_chance + FEW_TOKENS:
                yield (
                    f"sample {sample}: {disjoint / compared:.0%} of its {compared} choices (token, layer) have no "
                    "expert in common with those that the trainer makes with the same weights (limit "
                    f"{limit:.0%} and what chance adds): the rollout engine's routes are probably not of this "
                    "completion. Look at the engine's log and caches; replay.max_disagreement is the limit."
                )


def _has_enough(totals: RouteTotals) -> bool:
    """Return whether each layer with routers has enough tokens to measure a limit; of a few, chance makes any share."""
    counts = [
        current for compared, current in zip(totals.compared_L, totals.current_L, strict=True) if compared
    ]
    return bool(counts) and min(counts) >= MEASURED_TOKENS
