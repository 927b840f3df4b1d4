"""The recorded events of pipeline stages, played through with every message: when each pass happens, whether messages
reach their targets, and whether the stages ever wait for each other.

NCCL distinguishes messages between two ranks only by their order, so that the first send of a group is taken by the
first receive there. Messages that are posted singly share a queue with all other such messages between the same two
ranks in the same group, and a send ends with its receive; messages of a batch begin together (torch's
ProcessGroupNCCL).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcore_rl.errors import ConfigError
from mcore_rl.planning.schedule import Kind, Pass
from mcore_rl.planning.simulate import DeadlockError, Event, Simulation


@dataclass(frozen=True, slots=True)
class Compute:
    """A pass over one microbatch."""

    kind: Kind
    chunk: int
    microbatch: int
    message: int | None
    """Index of the received message that it reads; None if it begins from tokens, or from the loss."""


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a message between two stages."""

    index: int
    """Index among the messages of its stage."""
    is_send: bool
    peer: int
    """The other stage."""
    is_in_world: bool
    """Whether it goes through the group of all ranks, not through the stages' group."""
    made_by: Pass | None
    """The pass that made the sent result; None for a receive."""


@dataclass(frozen=True, slots=True)
class Post:
    """Messages that begin together."""

    messages: tuple[Message, ...]
    is_batch: bool
    """Whether they were posted as a batch, also of a single message."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for the end of messages."""

    messages: tuple[int, ...]


StageEvent = Compute | Post | Wait


class SwappedMessageError(ConfigError):
    """A stage takes a message for another message."""


def passes_of(events: Sequence[StageEvent]) -> list[Pass]:
    """Return the passes of a stage, in order."""
    return [(event.kind, event.chunk, event.microbatch) for event in events if isinstance(event, Compute)]


def play(
    stages: Sequence[Sequence[StageEvent]],
    seconds_of: Callable[[Kind, int, int], float],
    message_s: float = 0.0,
) -> Simulation:
    """Return when each pass of recorded stages happens.

    Args:
        stages: Events of each stage, in order.
        seconds_of: Seconds of a pass by kind, stage and chunk.
        message_s: Seconds of a message, from when both of its ends have begun.

    Raises:
        DeadlockError: Stages wait for each other.
        SwappedMessageError: A pass reads a message that was not made for it.
    """
    partners = _partners(stages)
    _check_uses(stages, partners)
    played = [_Stage(index, events) for index, events in enumerate(stages)]
    begun: dict[End, float] = {}
    while not all(stage.is_done for stage in played):
        moved = [stage.advance(seconds_of) for stage in played]
        moved += [stage.exchange(begun, partners, message_s) for stage in played]
        if not any(moved):
            stuck = [f"stage {stage.index} at {stage.describe()}" for stage in played if not stage.is_done]
            raise DeadlockError(f"Stages wait for each other: {', '.join(stuck)}.")
    drawn = [event for stage in played for event in stage.drawn]
    return Simulation(
        seconds=max(event.end_s for event in drawn),
        busy_s=[sum(event.end_s - event.start_s for event in stage.drawn) for stage in played],
        alive=[stage.most_alive for stage in played],
        events=sorted(drawn, key=lambda event: event.start_s),
    )


End = tuple[int, int]
"""One end of a message: a stage, and the message's index there."""


def _partners(stages: Sequence[Sequence[StageEvent]]) -> dict[End, End]:
    """Return the other end of each message; a message that nobody sends or receives has none."""
    sends: dict[tuple[int, int, bool], list[End]] = defaultdict(list)
    receives: dict[tuple[int, int, bool], list[End]] = defaultdict(list)
    for stage, events in enumerate(stages):
        for message in (message for event in events if isinstance(event, Post) for message in event.messages):
            pair = (stage, message.peer) if message.is_send else (message.peer, stage)
            side = sends if message.is_send else receives
            side[*pair, message.is_in_world].append((stage, message.index))
    pairs = [(one, other) for key in sends for one, other in zip(sends[key], receives[key], strict=False)]
    return dict(pairs) | {other: one for one, other in pairs}


def _check_uses(stages: Sequence[Sequence[StageEvent]], partners: dict[End, End]) -> None:
    """Raise a SwappedMessageError if a pass reads the result of a pass that does not come right before it."""
    made_by = {
        (stage, message.index): message.made_by
        for stage, events in enumerate(stages)
        for event in events
        if isinstance(event, Post)
        for message in event.messages
    }
    for stage, events in enumerate(stages):
        for event in events:
            if not isinstance(event, Compute) or event.message is None:
                continue
            sender = partners.get((stage, event.message))
            found = made_by[sender] if sender else None
            if sender is None or found is None:
                continue  # it never arrives
            kind, chunk, microbatch = found
            place, source = event.chunk * len(stages) + stage, chunk * len(stages) + sender[0]
            before = place - 1 if event.kind == "F" else place + 1
            if (kind, source, microbatch) != (event.kind, before, event.microbatch):
                what = {"F": "activation", "B": "gradient"}
                raise SwappedMessageError(
                    f"Stage {stage} takes the {what[kind]} of microbatch {microbatch} that chunk {chunk} of stage "
                    f"{sender[0]} sends for the {what[event.kind]} of microbatch {event.microbatch} of its chunk "
                    f"{event.chunk}: they are told apart by their order alone."
                )


Queue = tuple[bool, int | None]
"""Messages that follow one another on a stage: messages of a group with another stage, or (None) its batches."""


@dataclass(slots=True)
class _Open:
    """Messages that were posted together and have not all ended."""

    post: Post
    posted_s: float


class _Stage:
    """A stage at some point of its events."""

    def __init__(self, index: int, events: Sequence[StageEvent]) -> None:
        self.index, self.events, self.position = index, events, 0
        self.clock_s = 0.0
        self.alive = self.most_alive = 0
        self.drawn: list[Event] = []
        self.queues: dict[Queue, list[_Open]] = defaultdict(list)
        self.free_s: dict[Queue, float] = defaultdict(float)
        self.ends: dict[int, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether all events are over."""
        return self.position == len(self.events)

    def exchange(self, begun: dict[End, float], partners: dict[End, End], message_s: float) -> bool:
        """Let the first messages of each queue begin, and end if their other ends have begun.

        Returns:
            Whether any did.
        """
        moved = False
        for queue, waiting in self.queues.items():
            if not waiting:
                continue
            messages = [(self.index, message.index) for message in waiting[0].post.messages]
            if messages[0] not in begun:
                begun |= dict.fromkeys(messages, max(waiting[0].posted_s, self.free_s[queue]))
                moved = True
            for end in messages:
                other = partners.get(end)
                if end[1] not in self.ends and other in begun:
                    self.ends[end[1]] = max(begun[end], begun[other]) + message_s
                    moved = True
            if all(index in self.ends for _, index in messages):
                self.free_s[queue] = max(self.ends[index] for _, index in messages)
                del waiting[0]
        return moved

    def describe(self) -> str:
        """Return the messages that the stage waits for."""
        event = self.events[self.position]
        assert isinstance(event, Wait)
        posts = (post for post in self.events if isinstance(post, Post))
        message = next(
            message for post in posts for message in post.messages if message.index in event.messages
        )
        return f"a {'send to' if message.is_send else 'receive from'} stage {message.peer}"

    def advance(self, seconds_of: Callable[[Kind, int, int], float]) -> bool:
        """Go on to the next wait for messages that have not ended; return whether anything was done."""
        before = self.position
        while not self.is_done:
            event = self.events[self.position]
            if isinstance(event, Compute):
                self._compute(event, seconds_of(event.kind, self.index, event.chunk))
            elif isinstance(event, Post):
                first = event.messages[0]
                queue = (first.is_in_world, None if event.is_batch else first.peer)
                self.queues[queue].append(_Open(event, self.clock_s))
            elif all(index in self.ends for index in event.messages):
                self.clock_s = max(self.clock_s, *(self.ends[index] for index in event.messages))
            else:
                break
            self.position += 1
        return self.position > before

    def _compute(self, event: Compute, seconds: float) -> None:
        end_s = self.clock_s + seconds
        self.drawn.append(Event(self.index, event.kind, event.chunk, event.microbatch, self.clock_s, end_s))
        self.clock_s = end_s
        self.alive += 1 if event.kind == "F" else -1
        self.most_alive = max(self.most_alive, self.alive)
