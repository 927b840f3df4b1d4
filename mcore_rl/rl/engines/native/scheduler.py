"""Scheduler of continuous batching, which selects the tokens of each step. It uses no tensors.

All ranks of a replica compute the same schedule independently, from the same requests and tokens.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False, kw_only=True, slots=True)
class Draft:
    """A completion in progress."""

    group: int
    index: int
    """Index of the completion in its group."""
    prompt_T: tuple[int, ...]
    seed: int
    tokens_T: list[int] = field(default_factory=list)
    logprobs_T: list[float] = field(default_factory=list)
    kept_logprobs_T: list[float] = field(default_factory=list)
    cached: int = 0
    """Number of positions with keys and values in the draft's slot."""
    is_stopped: bool = False
    """Whether the newest token, or a stop string that it completes, ends the completion."""

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.cached >= len(self.prompt_T)


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions from `start` up to, but excluding, `stop` of a slot's prompt, computed in a single step."""

    slot: int
    start: int
    stop: int
    followers: tuple[int, ...] = ()
    """Slots of other completions of the prompt, if the span ends the prompt: they draw from its last token too, and
    get the prompt's keys and values after the step."""

    @property
    def drawing(self) -> tuple[int, ...]:
        """The slots that draw from the span's last token, if the span ends a prompt."""
        return self.slot, *self.followers


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of the first `length` positions of a slot to another slot."""

    source: int
    target: int
    length: int


class StepToken(NamedTuple):
    """A token that a step computes."""

    token: int
    slot: int
    position: int
    """Position in the slot; after the step the slot holds all positions up to it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step: first `copies`, in order; then tokens of slots 0 ... num_decode - 1 and the spans; then `branches`."""

    copies: tuple[Copy, ...]
    num_decode: int
    spans: tuple[PromptSpan, ...]
    rows: tuple[StepToken, ...]
    """All tokens of the step: a token of each decoding slot, then the spans' tokens."""
    drawing: tuple[int, ...]
    """Slots that draw a token: the decoding slots, then the `drawing` slots of each span that ends a prompt."""

    @property
    def branches(self) -> list[Copy]:
        """Copies after the step: the shared prompt to each follower."""
        return [Copy(span.slot, follower, span.stop) for span in self.spans for follower in span.followers]


class Scheduler:
    """Assigns completions to slots: a dense prefix of slots decodes, followed by at most one partly computed prompt.

    A group's prompt is computed for its first completion, and all completions of the group that have a slot draw from
    its last token. Completions that get a slot later copy the prompt and recompute only its last token. Slots are
    reserved for them, so that a prompt is rarely dropped before all have copied it; if it is, it is recomputed. If
    slots cannot be cut back to the prompt (`can_cut`), later completions recompute it, and no slots are reserved.
    """

    def __init__(self, drafts: Iterable[Draft], num_slots: int, budget_tokens: int, *, can_cut: bool = True) -> None:
        """Create the schedule.

        Args:
            drafts: All completions.
            num_slots: Maximum number of completions in progress.
            budget_tokens: Maximum number of tokens of a step.
            can_cut: Whether the first positions of a slot can be copied without the later positions.
        """
        assert 0 < num_slots < budget_tokens, (num_slots, budget_tokens)
        self._waiting: dict[int, deque[Draft]] = {}
        for draft in drafts:
            self._waiting.setdefault(draft.group, deque()).append(draft)
        self._num_slots, self._budget, self._can_cut = num_slots, budget_tokens, can_cut
        self.active: list[Draft] = []
        """Drafts in progress, by slot."""

    @property
    def is_waiting(self) -> bool:
        """Whether any completion has no slot yet, or a prompt that is not computed."""
        return bool(self._waiting) or not all(draft.is_read for draft in self.active)

    @property
    def is_busy(self) -> bool:
        """Whether any completion is unfinished."""
        return bool(self._waiting or self.active)

    def next_step(self) -> Step:
        """Return the next step, after assigning slots to the drafts that start with it."""
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
            # The group's waiting completions draw from the same last token.
            while is_whole and draft.group in self._waiting and len(self.active) < self._num_slots:
                self.active.append(self._take(draft.group))
            spans.append(PromptSpan(slot, draft.cached, stop, tuple(range(slot + 1, len(self.active)))))
            rows += [StepToken(draft.prompt_T[place], slot, place) for place in range(draft.cached, stop)]
            if is_whole:
                drawing += spans[-1].drawing
            budget -= stop - draft.cached
        return Step(tuple(copies), num_decode, tuple(spans), tuple(rows), tuple(drawing))

    def computed(self, step: Step) -> None:
        """Record that the step's keys and values are in the cache."""
        for draft in self.active[: step.num_decode]:
            draft.cached += 1
        for span in step.spans:
            for slot in span.drawing:
                self.active[slot].cached = span.stop

    def remove(self, slots: Sequence[int]) -> list[Copy]:
        """Free the slots of finished completions. Returns the copies, in order, that make the remaining slots dense."""
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

    def _admit_leader(self) -> bool:
        """Assign a slot to the first completion of a group without a computed prompt, if an unreserved slot is free."""
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
