"""What every engine must do, whatever it is; a test hands it one on a model with `VOCAB` tokens and experts or none."""

import dataclasses

import pytest

from mcore_rl.errors import EngineError
from mcore_rl.rl.engines.base import Engine, Sampling
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion, Group
from tests.generating import prompt_of, ragged_prompts

FREE = Sampling(max_new_tokens=6)
GREEDY = Sampling(max_new_tokens=6, cut=Cut(temperature=0.0))


def check_all(engine: Engine, vocab: int) -> None:
    """AssertionError where `engine` breaks the contract."""
    for check in (groups_in_order, versions, ends, seeds, routes, refusals):
        check(engine, vocab)


def one(engine: Engine, tokens: tuple[int, ...], sampling: Sampling, seed: int = 0) -> Completion:
    """The completion of one prompt."""
    return engine.generate([prompt_of(tokens)], sampling, [[seed]])[0].completions[0]


def groups_in_order(engine: Engine, vocab: int) -> None:
    prompts = ragged_prompts(5, vocab)
    seeds_PG = [[1, 2, 3], [4], [], [5, 6], [7]]
    groups = engine.generate(prompts, FREE, seeds_PG)
    assert [group.prompt for group in groups] == prompts
    assert [len(group.completions) for group in groups] == [3, 1, 0, 2, 1]
    for completion in completions(groups):
        assert 1 <= len(completion.tokens_T) <= 6
        assert all(0 <= token < vocab for token in completion.tokens_T)
        assert all(logprob <= 0 for logprob in completion.logprobs_T)
    assert engine.generate([], FREE, []) == []


def versions(engine: Engine, vocab: int) -> None:
    engine.update_weights(3)
    assert engine.policy_version == 3
    assert one(engine, (1, 2), FREE).policy_version == 3


def ends(engine: Engine, vocab: int) -> None:
    whole = one(engine, (1, 2), GREEDY)
    assert whole.finish == "length" and whole.is_truncated and len(whole.tokens_T) == 6
    third = whole.tokens_T[2]
    place = whole.tokens_T.index(third) + 1
    stopped = one(engine, (1, 2), dataclasses.replace(GREEDY, stop_tokens=frozenset([third])))
    assert stopped.finish == "stop" and stopped.tokens_T == whole.tokens_T[:place]
    last = dataclasses.replace(GREEDY, max_new_tokens=place, stop_tokens=frozenset([third]))
    assert one(engine, (1, 2), last).finish == "stop"


def seeds(engine: Engine, vocab: int) -> None:
    if not engine.capabilities.seeded:
        return
    prompts = ragged_prompts(32, vocab)
    lengths = dataclasses.replace(FREE, max_new_tokens=8, stop_tokens=frozenset(range(vocab // 8)))
    groups = engine.generate(prompts, lengths, [[place, place + 100] for place in range(32)])
    assert len({len(completion.tokens_T) for completion in completions(groups)}) > 4
    for place in (0, 7, 31):
        alone = one(engine, prompts[place].tokens_T, lengths, place + 100)
        among = groups[place].completions[1]
        assert alone.tokens_T == among.tokens_T and alone.finish == among.finish
        assert alone.logprobs_T == pytest.approx(among.logprobs_T, abs=2e-5)
    assert len({one(engine, (1, 2), FREE, seed).tokens_T for seed in range(8)}) > 4


def routes(engine: Engine, vocab: int) -> None:
    wanted = dataclasses.replace(FREE, with_routes=True)
    if not engine.capabilities.routes:
        with pytest.raises(EngineError, match="routes"):
            one(engine, (1, 2), wanted)
        return
    completion = one(engine, (1, 2, 3), wanted)
    assert completion.experts_TLK is not None and len(completion.experts_TLK) == 3 + 6 - 1
    assert (completion.experts_TLK.sort(-1).values.diff(dim=-1) > 0).all(), "an expert twice"
    assert one(engine, (1, 2, 3), FREE).experts_TLK is None


def refusals(engine: Engine, vocab: int) -> None:
    longest = (1,) * (engine.capabilities.max_tokens - 5)
    with pytest.raises(EngineError, match=r"asks for 6 more.*rollout\.max_new_tokens"):
        one(engine, longest, FREE)
    with pytest.raises(EngineError, match="no tokens"):
        one(engine, (), FREE)


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]
