"""Continuous batching without a model: each position is computed in order, in the slot that holds those before."""

import random

import pytest

from mcore_rl.rl.engines.native.scheduler import Copy, Draft, PromptSpan, Scheduler


def run(
    prompts: list[int], group: int, slots: int, budget: int, seed: int = 0, can_cut: bool = True
) -> tuple[list[Draft], int, int]:
    """Completions of 1 to 9 tokens; what slots hold is kept beside the schedule and checked. Drafts, tokens, steps."""
    lengths = random.Random(seed)
    drafts = [
        Draft(group=place, index=index, prompt_T=tuple(place * 100 + t for t in range(length)), seed=0)
        for place, length in enumerate(prompts)
        for index in range(group)
    ]
    ends = {draft: lengths.randint(1, 9) for draft in drafts}
    scheduler = Scheduler(drafts, slots, budget, can_cut=can_cut)
    held: list[list[int]] = [[] for _ in range(slots)]
    tokens = steps = 0

    def copy(copies):
        for each in copies:
            assert len(held[each.source]) >= each.length
            assert can_cut or len(held[each.source]) == each.length
            held[each.target] = held[each.source][: each.length]

    while scheduler.is_busy:
        step = scheduler.next_step()
        copy(step.copies)
        assert [row.slot for row in step.rows[: step.num_decode]] == list(range(step.num_decode))
        for token, slot, position in step.rows:
            draft = scheduler.active[slot]
            assert held[slot][:position] == [*draft.prompt_T, *draft.tokens_T][:position]
            # What another completion left is overwritten from the first position on.
            assert can_cut or position in (0, len(held[slot]))
            held[slot] = [*held[slot][:position], token]
        begin = step.num_decode
        for span in step.spans:
            end = begin + span.stop - span.start
            assert {row.slot for row in step.rows[begin:end]} == {span.slot}
            assert held[span.slot] == list(scheduler.active[span.slot].prompt_T[: span.stop])
            begin = end
        done = len(step.rows)
        assert done == begin
        assert 0 < done <= budget and len(scheduler.active) <= slots
        tokens, steps = tokens + done, steps + 1
        scheduler.computed(step)
        copy(step.branches)
        finished = []
        for slot in step.drawing:
            draft = scheduler.active[slot]
            assert held[slot] == [*draft.prompt_T, *draft.tokens_T]
            draft.tokens_T.append(1000 + len(draft.tokens_T))
            if len(draft.tokens_T) == ends[draft]:
                finished.append(slot)
        if finished:
            copy(scheduler.remove(finished))
    assert all(len(draft.tokens_T) == ends[draft] for draft in drafts)
    return drafts, tokens, steps


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_every_completion_is_computed_from_its_own_positions(seed: int, can_cut: bool) -> None:
    choice = random.Random(seed)
    prompts = [choice.randint(1, 20) for _ in range(choice.randint(1, 12))]
    slots = choice.randint(1, 9)
    run(prompts, choice.randint(1, 5), slots, slots + choice.randint(1, 30), seed, can_cut)


@pytest.mark.parametrize(
    ("prompts", "slots", "can_cut", "computed"),
    [
        ([20, 15, 30], 24, True, 20 + 15 + 30),  # once whole, and all draw from its last token
        ([20], 3, True, 20 + 5),  # who gets a slot after the prompt computes its last token again
        # The first and its two followers read it once; of the other five two come at once, and read it once.
        ([20], 3, False, 20 + 4 * 20),
    ],
)
def test_a_prompt_is_computed_once_for_its_group_and_anew_where_a_slot_cannot_be_cut(prompts, slots, can_cut, computed):
    drafts, tokens, _ = run(prompts, group=8, slots=slots, budget=100, can_cut=can_cut)
    # Then all tokens drawn but each completion's last.
    assert tokens == computed + sum(len(draft.tokens_T) - 1 for draft in drafts)


def test_all_of_a_group_draw_in_the_step_that_ends_its_prompt() -> None:
    drafts = [Draft(group=0, index=index, prompt_T=(1, 2, 3, 4, 5), seed=0) for index in range(3)]
    scheduler = Scheduler(drafts, 4, 5)
    step = scheduler.next_step()
    assert step.spans == (PromptSpan(0, 0, 5, followers=(1, 2)),)
    assert step.drawing == (0, 1, 2) and step.branches == [Copy(0, 1, 5), Copy(0, 2, 5)]
    scheduler.computed(step)
    assert [draft.cached for draft in scheduler.active] == [5, 5, 5]


def test_a_finished_row_is_replaced_at_once() -> None:
    drafts, _, steps = run([1] * 40, group=1, slots=4, budget=8)
    work = sum(len(draft.tokens_T) for draft in drafts)
    # Full slots but for the end, when the longest completions run out.
    assert work / 4 <= steps <= work / 4 + 9


def test_a_prompt_beyond_the_budget_is_read_in_parts_while_others_go_on() -> None:
    drafts = [Draft(group=n, index=0, prompt_T=tuple(range(size)), seed=0) for n, size in enumerate((2, 25))]
    scheduler = Scheduler(drafts, 2, 10)
    seen = []
    for _ in range(4):
        step = scheduler.next_step()
        scheduler.computed(step)
        for slot in step.drawing:
            scheduler.active[slot].tokens_T.append(5)
        seen.append((step.num_decode, [(span.start, span.stop) for span in step.spans], step.drawing))
    assert seen == [(0, [(0, 2), (0, 8)], (0,)), (1, [(8, 17)], (0,)), (1, [(17, 25)], (0, 1)), (2, [], (0, 1))]
