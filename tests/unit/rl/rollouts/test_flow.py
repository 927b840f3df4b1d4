"""Groups that are generated while the policy trains: the bound, the order, errors, and the end."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from mcore_rl.config.rl.rollout import PromptConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.rollouts.flow import GroupFlow
from mcore_rl.rl.rollouts.prompts import TaskProblems, TaskPrompts
from mcore_rl.rl.types import Group, Prompt

PROMPTS = 3
WAIT_S = 60.0
"""More than any thread needs to come to its next wait; nothing waits so long unless a test fails."""


class Server:
    """Answers a request when it is allowed to, and knows which came."""

    def __init__(self, answers: bool = True, broken: int = -1) -> None:
        self.changed = threading.Condition()
        self.asked: list[int] = []
        self.allowed: set[int] | None = None if answers else set()
        self.broken = broken

    def __call__(self, index: int, prompt: Prompt) -> Group:
        assert prompt.problem.problem_id == f"reversing/1/{index}"
        with self.changed:
            self.asked.append(index)
            self.changed.notify_all()
            answered = self.changed.wait_for(lambda: self.allowed is None or index in self.allowed, WAIT_S)
            assert answered
        if index == self.broken:
            raise EngineError(f"no server answers for prompt {index}")
        return Group(prompt=prompt, completions=())

    def allow(self, *indices: int) -> None:
        with self.changed:
            assert self.allowed is not None
            self.allowed |= set(indices)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[int]:
        """Wait until so many requests have come, and return them, rising."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, WAIT_S), self.asked
            return sorted(self.asked)


def whole(group: Group, stage: int) -> Group:
    return group


@contextmanager
def flow_of(
    server: Server, mesh: Mesh, *, staleness: int = 1, rollouts: range = range(9), cursor: int = 0
) -> Iterator[GroupFlow]:
    problems = TaskProblems(config=PromptConfig(task="reversing"), seed=1, held_out=frozenset())
    with closing(
        GroupFlow(
            server,
            TaskPrompts(problems=problems, encode=lambda one: Prompt(problem=one, tokens_T=(1,))),
            mesh,
            asks=True,
            prompts_per_step=PROMPTS,
            max_staleness=staleness,
            rollouts=rollouts,
            cursor=cursor,
        )
    ) as flow:
        yield flow


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_group_starts_beyond_the_bound_or_the_end_of_the_run(one_rank: Mesh, staleness: int) -> None:
    """A run that resumes after two of seven rollout batches, at prompt 20; a batch is the next prompts, in order."""
    server = Server()
    with flow_of(server, one_rank, staleness=staleness, rollouts=range(2, 7), cursor=20) as flow:
        for version in range(2, 7):
            flow.admit(version)
            bound = 20 + min(staleness + version - 2 + 1, 5) * PROMPTS
            assert server.wait_for(bound - 20) == list(range(20, bound))
            assert flow.started == bound
            cursor = 20 + (version - 2) * PROMPTS
            groups, seconds = flow.take(cursor, whole)
            names = [group.prompt.problem.problem_id for group in groups]
            assert names == [f"reversing/1/{index}" for index in range(cursor, cursor + PROMPTS)]
            assert seconds > 0
    assert sorted(server.asked) == list(range(20, 20 + 5 * PROMPTS))


def test_groups_that_end_in_another_order_are_taken_in_that_of_their_prompts(one_rank: Mesh) -> None:
    server = Server(answers=False)
    with flow_of(server, one_rank) as flow:
        flow.admit(0)
        server.wait_for(2 * PROMPTS)
        server.allow(5, 3, 4)  # the second rollout batch is there first, and waits for its turn
        taken: list[Group] = []
        first = threading.Thread(target=lambda: taken.extend(flow.take(0, whole)[0]))
        first.start()
        server.allow(2, 1)
        assert not taken
        server.allow(0)
        first.join(WAIT_S)
        groups = taken + flow.take(PROMPTS, whole)[0]
    assert [group.prompt.problem.problem_id for group in groups] == [f"reversing/1/{i}" for i in range(6)]


def test_no_group_starts_while_weights_are_updated_and_those_in_progress_end(one_rank: Mesh) -> None:
    server = Server(answers=False)
    with flow_of(server, one_rank, staleness=0) as flow:
        flow.admit(0)
        assert server.wait_for(PROMPTS) == [0, 1, 2]
        with flow.held():
            flow.admit(1)  # these may start, but not yet
            server.allow(0, 1, 2)
            assert len(flow.take(0, whole)[0]) == PROMPTS
            assert server.wait_for(PROMPTS) == [0, 1, 2]
            assert flow.started == PROMPTS
        assert server.wait_for(2 * PROMPTS) == [0, 1, 2, 3, 4, 5]
        server.allow(3, 4, 5)


def test_an_error_of_a_later_group_ends_the_run_before_its_turn(one_rank: Mesh) -> None:
    server = Server(answers=False, broken=5)
    with flow_of(server, one_rank) as flow:
        flow.admit(0)
        server.wait_for(2 * PROMPTS)
        server.allow(5)
        with pytest.raises(EngineError, match="no server answers for prompt 5"):
            flow.take(0, whole)  # whose groups are not answered
    server.allow(*range(5))


def test_after_the_close_nothing_starts_and_the_threads_end(one_rank: Mesh) -> None:
    before = set(threading.enumerate())
    server = Server(answers=False)
    with flow_of(server, one_rank) as flow:
        flow.admit(0)
        server.wait_for(2 * PROMPTS)
        with flow.held():
            flow.admit(1)
            flow.close()  # as at an error in an update; six are in progress, three wait for a thread
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2 * PROMPTS and all(thread.daemon for thread in threads)
    server.allow(*range(2 * PROMPTS))
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert sorted(server.asked) == list(range(2 * PROMPTS))
