"""Which tokens of which completions a step computes: continuous batching, without tensors.

All ranks of a model make the same schedule by themselves from the same requests and tokens.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False, kw_only=True, slots=True)
class Draft:
    """A completion in the making."""

    group: int
    index: int
    """Index among the completions of its group."""
    prompt_T: tuple[int, ...]
    seed: int
    tokens_T: list[int] = field(default_factory=list)
    logprobs_T: list[float] = field(default_factory=list)
    untempered_logprobs_T: list[float] = field(default_factory=list)
    kept_logprobs_T: list[float] = field(default_factory=list)
    cached: int = 0
    """Positions whose keys and values are in its slot."""

    @property
    def is_read(self) -> bool:
        """Whether its whole prompt has been computed."""
        return self.cached >= len(self.prompt_T)


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions `start` to `stop` of a slot's prompt, computed in one step."""

    slot: int
    start: int
    stop: int
    followers: tuple[int, ...] = ()
    """Slots of other completions of the prompt, where the span ends it: they draw from its last token too, and have
    the prompt's keys and values after the step."""

    @property
    def drawing(self) -> tuple[int, ...]:
        """The slots that draw from the span's last token, where the span ends a prompt."""
        return self.slot, *self.followers


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `length` positions of a slot become those of another."""

    source: int
    target: int
    length: int


class StepToken(NamedTuple):
    """A token that a step computes."""

    token: int
    slot: int
    position: int
    """Position in the slot, which then holds those up to it."""


@dataclass(frozen=True, slots=True)
class Step:
    """Copies first, in order; then one token of each of the slots 0 ... num_decode - 1, then spans; then `branches`."""

    copies: tuple[Copy, ...]
    num_decode: int
    spans: tuple[PromptSpan, ...]
    rows: tuple[StepToken, ...]
    """All of these tokens, in this order."""
    drawing: tuple[int, ...]
    """Slots that draw a token: those that decode, then those whose span ends with their prompt, with its followers."""

    @property
    def branches(self) -> list[Copy]:
        """Copies that follow the step: to each follower the prompt that it shares."""
        return [Copy(span.slot, follower, span.stop) for span in self.spans for follower in span.followers]


class Scheduler:
    """Slots 0 ... n - 1 hold completions: a dense prefix decodes, and behind it at most one prompt is half-read.

    A group's prompt is computed for its first completion, and all that have a slot draw from its last token. Those that
    get one later copy the prompt and compute its last token again. Slots are kept for them, so that a prompt is rarely
    gone before all have it; then it is computed anew. Where a slot cannot be cut back to its prompt, those that come
    later compute the prompt anew, and no slots are kept.
    """

    def __init__(
        self, drafts: Iterable[Draft], num_slots: int, budget_tokens: int, *, can_cut: bool = True
    ) -> None:
        """Make an empty schedule.

        Args:
            drafts: All completions.
            num_slots: Most completions in progress.
            budget_tokens: Most tokens of a step.
            can_cut: Whether the first positions of a slot can be copied without those behind them.
        """
        assert 0 < num_slots < budget_tokens, (num_slots, budget_tokens)
        self._waiting: dict[int, deque[Draft]] = {}
        for draft in drafts:
            self._waiting.setdefault(draft.group, deque()).append(draft)
        self._num_slots, self._budget, self._can_cut = num_slots, budget_tokens, can_cut
        self.active: list[Draft] = []
        """Drafts in progress, by slot."""

    @property
    def is_busy(self) -> bool:
        """Whether completions are unfinished."""
        return bool(self._waiting or self.active)

    def next_step(self) -> Step:
        """Return what to compute now; drafts admitted for it have their slots."""
        half = self.active.pop() if self.active and not self.active[-1].is_read else None
        half_slot = len(self.active)
        copies = self._admit_siblings(self._num_slots - (half is not None)) if self._can_cut else []
        num_decode = len(self.active)
        if half is not None:
            self.active.append(half)
            if half_slot != num_decode:
                copies.insert(0, Copy(half_slot, num_decode, half.cached))
        rows = [
            StepToken(draft.tokens_T[-1] if draft.tokens_T else draft.prompt_T[-1], slot, draft.cached)
            for slot, draft in enumerate(self.active[:num_decode])
        ]
        spans: list[PromptSpan] = []
        drawing, budget = list(range(num_decode)), self._budget - num_decode
        while budget > 0 and (half is not None or self._admit_leader()):
            draft, half = self.active[-1], None
            slot, stop = len(self.active) - 1, min(draft.cached + budget, len(draft.prompt_T))
            is_whole = stop == len(draft.prompt_T)
            followers = self._admit_followers(draft.group) if is_whole else ()
            spans.append(PromptSpan(slot, draft.cached, stop, followers))
            rows += [StepToken(draft.prompt_T[place], slot, place) for place in range(draft.cached, stop)]
            if is_whole:
                drawing += spans[-1].drawing
            budget -= stop - draft.cached
        return Step(tuple(copies), num_decode, tuple(spans), tuple(rows), tuple(drawing))

    def computed(self, step: Step) -> None:
        """Note that the step's keys and values are in the cache."""
        for draft in self.active[: step.num_decode]:
            draft.cached += 1
        for span in step.spans:
            for slot in span.drawing:
                self.active[slot].cached = span.stop

    def remove(self, slots: Sequence[int]) -> list[Copy]:
        """Free these slots of finished completions: what to copy, in order, so that the others are dense again."""
        half = self.active.pop() if not self.active[-1].is_read else None
        half_slot = len(self.active)
        copies = []
        for slot in sorted(slots, reverse=True):
            last = self.active.pop()
            if slot < len(self.active):
                copies.append(Copy(len(self.active), slot, last.cached))
                self.active[slot] = last
        if half is not None:
            if slots:
                copies.append(Copy(half_slot, len(self.active), half.cached))
            self.active.append(half)
        return copies

    def _admit_siblings(self, num_slots: int) -> list[Copy]:
        copies = []
        sources = {draft.group: slot for slot, draft in enumerate(self.active)}
        for group, source in sources.items():
            while group in self._waiting and len(self.active) < num_slots:
                draft = self._take(group)
                draft.cached = len(draft.prompt_T) - 1
                if draft.cached:
                    copies.append(Copy(source, len(self.active), draft.cached))
                self.active.append(draft)
        return copies

    def _admit_followers(self, group: int) -> tuple[int, ...]:
        """Give slots to those of a group that wait for its prompt, which ends in this step; return the slots."""
        begin = len(self.active)
        while group in self._waiting and len(self.active) < self._num_slots:
            self.active.append(self._take(group))
        return tuple(range(begin, len(self.active)))

    def _admit_leader(self) -> bool:
        """Give a slot to the first of a group whose prompt nobody has, if one is free beyond those that are kept."""
        groups = {draft.group for draft in self.active} if self._can_cut else set()
        kept = sum(len(self._waiting.get(group, ())) for group in groups)
        group = next((group for group in self._waiting if group not in groups), None)
        if group is None or len(self.active) + kept >= self._num_slots:
            return False
        self.active.append(self._take(group))
        return True

    def _take(self, group: int) -> Draft:
        queue = self._waiting[group]
        draft = queue.popleft()
        if not queue:
            del self._waiting[group]
        return draft
