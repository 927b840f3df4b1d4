"""Conversations with environments on one rank: their tokens, masks, logprobs and routes, their ends and failures."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mcore_rl.data.chat import Conversation
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.environments.conversations import _Draft
from mcore_rl.rl.types import Completion, Group, Prompt, single_version
from tests.conversing import END, LETTERS, chat_of, config_of, conversations_of, held, problems, sampling, seeds_of
from tests.hf_models import Oracle
from tests.unit.rl.engines.test_served import served
from tests.unit.rl.environments.test_agents import trained_logprobs

SIX = problems(*"123456")


def test_masks_and_logprobs_are_those_of_a_teacher_forced_pass_over_the_whole_conversation(
    theirs: Oracle, chunks: list[nn.Module], engine: MegatronEngine, folder: Path, one_rank: Mesh
) -> None:
    groups = held(config_of(theirs.ours), engine, folder, one_rank, SIX)
    pairs = [(group.prompt, one) for group in groups for one in group.completions]
    assert max(len(one.episode.turns) for _, one in pairs) >= 4
    batch, logprobs_T = trained_logprobs(chunks, one_rank, pairs)
    difference_T = (logprobs_T - batch.rollout_logprobs_T).abs()
    assert difference_T[batch.mask_T].max() < 1e-5
    assert batch.lengths_N.tolist() == [one.num_sampled for _, one in pairs]
    sampled = [[token for start, end in one.sampled_spans for token in one.tokens_T[start:end]] for _, one in pairs]
    assert batch.inputs.labels_Bs[0][batch.mask_T].tolist() == [token for tokens in sampled for token in tokens]
    assert torch.equal(batch.mask_T, batch.completion_mask_T)
    assert not logprobs_T[~batch.mask_T].any()


@pytest.mark.full
@pytest.mark.parametrize("template", ["tokenizer", "plain", "raw"])
def test_the_tokens_between_turns_are_those_of_the_template(template, theirs, engine, folder, one_rank):
    """With a token for each character a conversation has one tokenisation: here the whole is rendered at once."""
    config = config_of(theirs.ours, template)
    _, chat = chat_of(config, folder)
    for group in held(config, engine, folder, one_rank, SIX[:4]):
        for one in group.completions:
            messages = list(one.episode.messages)
            if messages[-1]["role"] != "assistant":
                messages.pop()  # what is not answered is not in the tokens
            start, end = one.sampled_spans[-1]
            before = chat.prompt(Conversation(messages=tuple(messages[:-1])))
            whole = [*group.prompt.tokens_T, *one.tokens_T[:start]]
            assert whole == before
            assert end == len(one.tokens_T)
            assert one.text == engine.decode([t for t in one.tokens_T[start:] if t != END])
            assert messages[-1]["content"] == one.text


@pytest.mark.full
def test_routes_are_those_of_one_pass_over_the_conversation(theirs, engine, folder, one_rank):
    groups = held(config_of(theirs.ours), engine, folder, one_rank, SIX[:3], with_routes=True)
    for group in groups:
        for one in group.completions:
            tokens_T = (*group.prompt.tokens_T, *one.tokens_T)[:-1]
            once = Sampling(max_new_tokens=1, with_routes=True)
            (again,) = engine.generate([dataclasses.replace(group.prompt, tokens_T=tokens_T)], once, [[0]])
            assert torch.equal(one.experts_TLK, again.completions[0].experts_TLK)


def turn(routes: list[int] | None, num_tokens: int) -> Completion:
    experts_TLK = None if routes is None else torch.tensor(routes, dtype=torch.uint8)[:, None, None]
    return Completion(
        text="",
        tokens_T=(7,) * num_tokens,
        logprobs_T=(-1.0,) * num_tokens,
        versions=single_version(0, num_tokens),
        finish="stop",
        experts_TLK=experts_TLK,
    )


def test_turns_without_routes_leave_their_rows_out() -> None:
    """A prompt of three tokens, turns of two, one token of the environment between them. What a later turn computes
    again of an earlier one may be of other weights.
    """
    draft = _Draft(group=0, index=0, seed=0)
    draft.add(turn(None, 2))
    assert draft.routes is None
    draft.insert([9])
    draft.add(turn([1] * 7, 2))
    draft.insert([9])
    draft.add(turn(None, 2))
    draft.insert([9])
    draft.add(turn([2] * 13, 2))
    assert draft.routes.flatten().tolist() == [-1] * 4 + [1] * 3 + [-1] * 3 + [2] * 3
    draft.insert([9])
    draft.add(turn(None, 2))
    assert draft.routes.flatten().tolist()[10:] == [2] * 3 + [-1] * 3


def test_the_first_turn_is_the_completion_that_there_is_without_an_environment(theirs, engine, folder, one_rank):
    config = config_of(theirs.ours, max_turns=1)
    tokenizer, _ = chat_of(config, folder)
    groups = held(config, engine, folder, one_rank, SIX)
    alone = engine.generate(
        [group.prompt for group in groups],
        sampling(config, tokenizer),
        [[int(group.prompt.problem.problem_id) * 10 + g for g in range(2)] for group in groups],
    )
    for group, other in zip(groups, alone, strict=True):
        for one, wanted in zip(group.completions, other.completions, strict=True):
            assert (one.tokens_T, one.logprobs_T) == (wanted.tokens_T, wanted.logprobs_T)
            assert one.kept_logprobs_T == wanted.kept_logprobs_T
            assert one.is_truncated  # also where the turn itself is not: the environment has not ended it


@pytest.mark.full
def test_limits_of_turns_and_of_context_end_conversations_and_count_as_truncated(theirs, engine, folder, one_rank):
    def ends(**environment: object) -> Counter[tuple[str, bool]]:
        groups = held(config_of(theirs.ours, **environment), engine, folder, one_rank, SIX, group_size=4)
        found = [one for group in groups for one in group.completions]
        assert max(len(one.episode.turns) for one in found) <= int(str(environment.get("max_turns", 99)))
        assert max(len(one.tokens_T) for one in found) <= int(str(environment.get("max_tokens", 100)))
        return Counter((one.episode.end, one.is_truncated) for one in found)

    turns = ends(max_turns=2)
    assert turns["turns", True] > 0 and set(turns) <= {("turns", True), ("length", True)}
    context = ends(max_tokens=24, max_turns=50)
    assert context["context", True] > 0 and set(context) <= {("context", True), ("length", True)}
    done = ends(arguments={"turns": 2})
    assert done["done", False] > 0 and set(done) <= {("done", False), ("length", True)}


@pytest.mark.full
def test_a_turn_that_ends_the_document_and_not_the_turn_is_the_last(theirs, engine, folder, one_rank):
    """Letters end documents here, where they are no marks that the config names."""
    config = config_of(theirs.ours)
    rollout = config.rl.rollout.model_copy(update={"stop_tokens": ()})
    unmarked = config.model_copy(update={"rl": config.rl.model_copy(update={"rollout": rollout})})
    for one, has_marks in ((config, True), (unmarked, False)):
        groups = held(one, engine, folder, one_rank, SIX, ends=LETTERS)
        ends = {each.episode.end for group in groups for each in group.completions}
        assert ends <= ({"length", "turns", "context"} if has_marks else {"document", "length"})
        assert ("document" in ends) != has_marks


FAULTS = {
    "raise": ("raised", "KeyError: 'lost'"),
    "hang": ("timeout", "no answer within 2.0 s"),
    "die": ("died", "status 3"),
    "junk": ("bad_reply", "step returned 'well done'"),
    "text": ("bad_reply", "'well done' is no list of messages"),
    "nothing": ("bad_reply", "[] is no list of messages"),
    "nan": ("not_finite", "the reward of a turn is nan"),
    "lock": ("raised", "Faulty cannot be pickled between two calls"),
    "refuse": ("raised", "ValueError: no such problem"),
}


@pytest.mark.full
def test_an_environment_that_fails_or_floods_ends_its_own_conversation_only(theirs, engine, folder, one_rank):
    config = config_of(theirs.ours, name="tests.conversing:Faulty", timeout_s=2.0, max_turns=3, workers=2)
    prompts = problems(*FAULTS, "flood", "long", "")
    groups = held(config, engine, folder, one_rank, prompts, group_size=4)
    sound = held(config_of(theirs.ours, max_turns=3), engine, folder, one_rank, prompts, group_size=4)
    for group, other in zip(groups, sound, strict=True):
        fault = group.prompt.problem.answer
        for one, wanted in zip(group.completions, other.completions, strict=True):
            episode, healthy = one.episode, wanted.episode
            meets_fault = len(healthy.turns) >= 2 or fault == "refuse"
            if fault in FAULTS and meets_fault:
                kind, text = FAULTS[fault]
                assert episode.end == "failed" and episode.failure is not None
                assert (episode.failure.kind, text in episode.failure.text) == (kind, True), episode.failure
                assert len(episode.turns) == (1 if fault == "refuse" else 2)
                assert one.tokens_T == wanted.tokens_T[: len(one.tokens_T)] or fault == "refuse"
            elif fault == "flood" and meets_fault:
                assert episode.end in ("context", "length") and len(episode.turns) == 2
            elif not fault or not meets_fault:
                assert one.tokens_T == wanted.tokens_T and episode == healthy
    met = {group.prompt.problem.answer for group in groups for one in group.completions if one.episode.end == "failed"}
    assert met == set(FAULTS)


class Asking:
    """An engine of servers in one: the native engine, which threads ask one after the other."""

    asks = True

    def __init__(self, native: MegatronEngine, after: int | None = None) -> None:
        self.native, self.lock, self.left = native, threading.Lock(), after
        """Requests until the weights are updated; None: they are not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        with self.lock:
            if self.left == 0:
                self.native.update_weights(7)
            self.left = None if self.left is None else self.left - 1
            return self.native.generate([prompt], sampling, [seeds_G])[0]

    def of_stage(self, group: Group, stage: int) -> Group:
        return group


@pytest.mark.full
def test_groups_that_are_held_while_the_policy_trains_are_those_that_are_held_between_updates(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh
) -> None:
    """Eight threads share two processes, of which some die; a failure ends its own conversation only."""
    config = config_of(theirs.ours, name="tests.conversing:Faulty", max_turns=3, workers=2)
    prompts = problems("1", "raise", "2", "die", "3", "refuse", "die", "")
    wanted = held(config, engine, folder, one_rank, prompts, with_routes=True)
    rules = sampling(config, chat_of(config, folder)[0], with_routes=True)
    with (
        conversations_of(config, Asking(engine), folder, one_rank) as conversations,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        found = threads.map(lambda one: conversations.hold_group(0, one, rules, seeds_of(one)), reversed(prompts))
    for group, other in zip(reversed(list(found)), wanted, strict=True):
        assert group.prompt == other.prompt
        for one, want in zip(group.completions, other.completions, strict=True):
            assert (one.tokens_T, one.finish, one.episode) == (want.tokens_T, want.finish, want.episode)
            assert one.logprobs_T == pytest.approx(want.logprobs_T, abs=2e-5)
            assert torch.equal(one.experts_TLK, want.experts_TLK)


@pytest.mark.full
def test_conversations_through_servers_are_the_native_engines_and_stay_with_the_server_that_has_their_prefix(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    config, prompts = config_of(theirs.ours, max_turns=3), problems("1", "2")
    with served(one_rank, tmp_path) as ours:
        ours.engine.decode = engine.decode
        for prompt in prompts:
            (wanted,) = held(config, engine, folder, one_rank, [prompt], group_size=1, with_routes=True)
            before = ours.asked("/inference/v1/generate")
            (found,) = held(config, ours.engine, folder, one_rank, [prompt], group_size=1, with_routes=True)
            (want,), (one,) = wanted.completions, found.completions
            num_turns = len(one.episode.turns)
            asked = [b - a for a, b in zip(before, ours.asked("/inference/v1/generate"), strict=True)]
            assert num_turns > 1 and sorted(asked) == [0, num_turns]
            assert (found.prompt, one.tokens_T, one.versions) == (wanted.prompt, want.tokens_T, want.versions)
            assert one.episode == want.episode
            assert one.logprobs_T == pytest.approx(want.logprobs_T, abs=2e-5)
            assert torch.equal(one.experts_TLK, want.experts_TLK)


def test_a_conversation_that_goes_on_after_an_update_has_the_versions_of_its_turns(theirs, engine, folder, one_rank):
    config = config_of(theirs.ours)
    rules = sampling(config, chat_of(config, folder)[0])
    try:
        with conversations_of(config, Asking(engine, after=1), folder, one_rank) as conversations:
            [prompt] = problems("")
            [one] = conversations.hold_group(0, prompt, rules, [4]).completions
        first_end = one.episode.turns[0].end
        spans = [(span.version, span.start, span.end) for span in one.versions]
        assert spans == [(0, 0, first_end), (7, first_end, len(one.tokens_T))]
    finally:
        engine.update_weights(0)
