"""The native engine on one rank: transformers' tokens, the training pass's logprobs and routes, and the contract."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.data.batch import Microbatch
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import routers
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model.inputs import localize
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.rl.batch import evaluating
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.engines.native.scheduler import Scheduler
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.rules import exact
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion, Prompt
from tests.generating import engine_on, loaded, ragged_prompts, spelled
from tests.hf_models import VOCAB, Oracle, oracle
from tests.parallel.parity import LogitsHead
from tests.unit.rl.engines import contract

CASES = ["qwen3_moe", "deepseek_v3"]
GREEDY = Sampling(max_new_tokens=8, cut=Cut(temperature=0.0))


def engine_of(case: str, mesh: Mesh, **sizes: int) -> tuple[Oracle, list[nn.Module], MegatronEngine]:
    theirs = oracle(case)
    chunks = loaded(theirs.ours, theirs.tensors, mesh)
    return theirs, chunks, engine_on(chunks, mesh, theirs.ours, **sizes)


def sequence(prompt: Prompt, completion: Completion) -> list[int]:
    return [*prompt.tokens_T, *completion.tokens_T]


def training_logits(chunks: list[nn.Module], mesh: Mesh, tokens: list[int]) -> Tensor:
    """`[S, V]` of the pass that trains."""
    tokens_1S = torch.tensor([tokens])
    microbatch = Microbatch(
        tokens_BS=tokens_1S,
        labels_BS=tokens_1S,
        loss_mask_BS=torch.ones(1, len(tokens)),
        position_ids_BS=torch.arange(len(tokens))[None],
    )
    local = localize(microbatch, mesh.cp, torch.device("cpu"))
    with torch.no_grad(), evaluating(chunks):
        kept = run_pass(chunks, [local], LogitsHead(mesh), backward=False)
    return kept[0]["logits"][0, :, :VOCAB]


@pytest.mark.matrix("deepseek_v2-lite")
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *("gpt_oss", "deepseek_v2-lite", "minimax_m2", "glm4_moe_lite"),
        *("dots1", "solar_open", "seed_oss", "mistral"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(case: str, one_rank: Mesh) -> None:
    """For two rows of each prompt: one read it, the other took it over."""
    theirs, _, engine = engine_of(case, one_rank, slots=5, step_tokens=16)
    prompts = ragged_prompts(6, VOCAB)
    for group in engine.generate(prompts, GREEDY, [[0, 0]] * 6):
        tokens_1S = torch.tensor([group.prompt.tokens_T])
        wanted_1S = theirs.model.generate(
            tokens_1S, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
        )
        for completion in group.completions:
            assert sequence(group.prompt, completion) == wanted_1S[0].tolist()


def test_no_token_is_dropped_while_generating_although_training_drops(one_rank: Mesh) -> None:
    theirs = oracle("qwen3_moe")
    dropping = theirs.ours.moe.model_copy(update={"capacity_factor": 0.5})
    model = theirs.ours.model_copy(update={"moe": dropping})
    chunks = loaded(model, theirs.tensors, one_rank)
    prompts = ragged_prompts(6, VOCAB)
    groups = engine_on(chunks, one_rank, model).generate(prompts, GREEDY, [[0, 0]] * 6)
    _, _, without = engine_of("qwen3_moe", one_rank)
    assert groups == without.generate(prompts, GREEDY, [[0, 0]] * 6)
    assert {router.config.moe_expert_capacity_factor for _, router in routers(chunks[0])} == {0.5}


@pytest.mark.matrix("deepseek_v3")
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_the_training_pass(case: str, one_rank: Mesh) -> None:
    _, chunks, engine = engine_of(case, one_rank, slots=5, step_tokens=16)
    sampling = Sampling(max_new_tokens=8, cut=Cut(temperature=0.7, top_k=30))
    for group in engine.generate(ragged_prompts(6, VOCAB), sampling, [[1, 2]] * 6):
        for completion in group.completions:
            logits_SV = training_logits(chunks, one_rank, sequence(group.prompt, completion))
            before_TV = logits_SV[len(group.prompt.tokens_T) - 1 : -1].double()
            all_TV = (before_TV / 0.7).log_softmax(-1)
            wanted_T = all_TV.gather(1, torch.tensor(completion.tokens_T)[:, None]).squeeze(1)
            assert completion.logprobs_T == pytest.approx(wanted_T.tolist(), abs=1e-5)


def test_ids_beyond_the_tokenizers_are_never_drawn_and_have_no_probability(one_rank: Mesh) -> None:
    _, chunks, engine = engine_of("qwen3_moe", one_rank)
    few = VOCAB // 4  # of the whole vocabulary a random model draws three in four from beyond these
    prompts = ragged_prompts(4, few)
    sampling = Sampling(max_new_tokens=8, vocab_size=few)
    for group in engine.generate(prompts, sampling, [[1, 2]] * 4):
        for completion in group.completions:
            assert max(completion.tokens_T) < few
            logits_SV = training_logits(chunks, one_rank, sequence(group.prompt, completion))
            all_TV = logits_SV[len(group.prompt.tokens_T) - 1 : -1, :few].double().log_softmax(-1)
            wanted_T = all_TV.gather(1, torch.tensor(completion.tokens_T)[:, None]).squeeze(1)
            assert completion.logprobs_T == pytest.approx(wanted_T.tolist(), abs=1e-5)


@pytest.mark.matrix("deepseek_v2-three-groups")
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *("minimax_m2", "glm4_moe_lite", "deepseek_v2-three-groups", "dots1", "solar_open"),
        *("deepseek_v32", "glm_moe_dsa-shared", "qwen3_next", "qwen3_5_moe_text"),
    ],
)
def test_routes_are_those_of_the_training_pass(case: str, one_rank: Mesh) -> None:
    theirs, chunks, engine = engine_of(case, one_rank, slots=5, step_tokens=16)
    routed: list[Tensor] = []
    for _, router in routers(chunks[0]):
        router.register_forward_hook(lambda module, inputs, output: routed.append(output[1]))
    sampling = Sampling(max_new_tokens=8, with_routes=True)
    groups = engine.generate(ragged_prompts(6, VOCAB), sampling, [[1, 2]] * 6)
    for group in groups:
        for completion in group.completions:
            routed.clear()
            training_logits(chunks, one_rank, sequence(group.prompt, completion)[:-1])
            wanted_TLE = torch.stack(routed, 1)
            experts_TLK = completion.experts_TLK
            assert experts_TLK is not None and experts_TLK.dtype == torch.uint8
            assert experts_TLK.shape[2] == theirs.ours.moe.top_k
            ours_TLE = torch.zeros_like(wanted_TLE).scatter_(2, experts_TLK.long(), True)
            assert torch.equal(ours_TLE, wanted_TLE)


@pytest.mark.matrix("llama")
@pytest.mark.parametrize("case", ["qwen3_moe", "llama"])
def test_it_keeps_the_contract_of_engines(case: str, one_rank: Mesh) -> None:
    contract.check_all(engine_of(case, one_rank)[2], VOCAB)


def test_steps_between_two_ends_are_scheduled_once(one_rank: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen completions of 30 tokens each in 16 slots: prompts, a step after them, and one step that repeats."""
    _, _, engine = engine_of("qwen3_moe", one_rank, slots=16)
    scheduled, next_step = [], Scheduler.next_step
    monkeypatch.setattr(
        Scheduler, "next_step", lambda scheduler: scheduled.append(next_step(scheduler)) or scheduled[-1]
    )
    sampling = dataclasses.replace(GREEDY, max_new_tokens=30, stop_tokens=frozenset())
    prompts = ragged_prompts(8, VOCAB)
    groups = engine.generate(prompts, sampling, [[1, 2]] * 8)
    assert {len(one.tokens_T) for group in groups for one in group.completions} == {30}
    assert len(scheduled) <= 4


def test_text_and_stop_strings_are_of_the_tokenizer(one_rank: Mesh) -> None:
    _, _, engine = engine_of("qwen3_moe", one_rank)
    prompts = ragged_prompts(1, VOCAB)
    whole = engine.generate(prompts, GREEDY, [[0]])[0].completions[0]
    assert whole.text == "".join(f"{token} " for token in whole.tokens_T)
    third, fourth = whole.tokens_T[2:4]
    string = dataclasses.replace(GREEDY, stop_strings=("never", f"{third} {fourth} "))
    stopped = engine.generate(prompts, string, [[0]])[0].completions[0]
    assert stopped.finish == "stop" and stopped.tokens_T == whole.tokens_T[:4]
    # The string stays in the text that is scored: the exact answer is what a pattern finds before it.
    answer = "".join(f"{token} " for token in whole.tokens_T[:2])
    assert stopped.text == answer + f"{third} {fourth} "
    scored = RewardInput(prompt="", completion=stopped.text, answer=answer, num_tokens=4, is_truncated=False, fields={})
    assert exact(scored, answer_pattern="") == 0.0
    assert exact(scored, answer_pattern=f"(.*){third} {fourth} ") == 1.0
    place = whole.tokens_T.index(fourth)
    token = dataclasses.replace(GREEDY, stop_tokens=frozenset([fourth]))
    ended = engine.generate(prompts, token, [[0]])[0].completions[0]
    assert ended.tokens_T[-1] == fourth
    assert ended.text == "".join(f"{token} " for token in whole.tokens_T[:place])


def test_completions_at_the_same_time_end_each_at_the_first_stop_string_of_its_own_text(one_rank: Mesh) -> None:
    _, _, engine = engine_of("qwen3_moe", one_rank)
    prompts, seeds = ragged_prompts(3, VOCAB), [[0, 1], [2, 3], [4, 5]]
    sampling = dataclasses.replace(GREEDY, cut=Cut())

    def tokens_with(*strings: str) -> list[tuple[int, ...]]:
        groups = engine.generate(prompts, dataclasses.replace(sampling, stop_strings=strings), seeds)
        return [completion.tokens_T for group in groups for completion in group.completions]

    whole = tokens_with()
    strings = [f"{tokens_T[1 + index]} {tokens_T[2 + index]} " for index, tokens_T in enumerate(whole)]

    def ended(tokens_T: tuple[int, ...]) -> tuple[int, ...]:
        ends = range(1, len(tokens_T))
        found = (end for end in ends if any(string in spelled(tokens_T[:end]) for string in strings))
        return tokens_T[: next(found, len(tokens_T))]

    wanted = [ended(tokens_T) for tokens_T in whole]
    assert tokens_with(*strings) == wanted and len(set(map(len, wanted))) > 2


def test_the_model_trains_on_as_if_nothing_had_been_generated(one_rank: Mesh) -> None:
    _, chunks, engine = engine_of("deepseek_v3", one_rank)
    chunks[0].train()
    load = RouterLoad(chunks)
    tokens_1S = torch.arange(16)[None]
    inputs = {"input_ids": tokens_1S, "position_ids": tokens_1S, "attention_mask": None}
    with torch.no_grad():
        before = chunks[0](**inputs)
    kept = {name: tensor.clone() for name, tensor in chunks[0].state_dict().items() if tensor is not None}
    engine.generate(ragged_prompts(3, VOCAB), GREEDY, [[1, 2]] * 3)
    assert chunks[0].training and not load.gather(one_rank).tokens_LE.any()
    for name, tensor in chunks[0].state_dict().items():
        assert tensor is None or torch.equal(tensor, kept[name]), name
    for name, buffer in chunks[0].named_buffers():
        assert "tokens_per_expert" not in name or not buffer.any(), name
    with torch.no_grad():
        assert torch.equal(chunks[0](**inputs), before)


def test_logits_that_are_not_finite_are_an_error(one_rank: Mesh) -> None:
    _, chunks, engine = engine_of("llama", one_rank)
    with torch.no_grad():
        next(chunks[0].parameters()).fill_(torch.nan)
    with pytest.raises(EngineError, match=r"version 0 gives logits that are not finite.*checkpoint"):
        engine.generate(ragged_prompts(1, VOCAB), GREEDY, [[0]])
