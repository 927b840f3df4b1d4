from dataclasses import replace
from math import inf

import pytest

from bench.plan import QWEN30, RL_RUNS, model
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.planning.device import DEVICES, Rates
from mcore_rl.planning.estimate import Place
from mcore_rl.planning.rollout import PUBLISHED_FACTORS, Engine, Lengths, decode_seconds, generation, share_longer
from mcore_rl.planning.training import training_of
from tests.unit.planning.test_search import RECIPES

BARE = Rates(hbm=1.0, link=1.0, decode_step_s=0.0, decode_message_s=0.0)
ONE = Engine(replicas=1, tp=1, ep=1, slots=64, layer_s=0.0)
H100 = DEVICES["H100"]


def test_the_bound_is_below_every_published_step_by_the_factors_that_a_plan_names():
    factors = [round(1 / run.ratio, 1) for run in RL_RUNS]
    assert (min(factors), max(factors)) == PUBLISHED_FACTORS


def test_a_token_of_one_completion_takes_the_reading_of_the_weights_and_the_cache():
    llama = model("llama3_8b")
    # 8.03e9 weights, 32 layers with 8 heads of 128 for keys and as many for values, of 2 bytes.
    read = 2 * 8.0303e9 + 2 * 1000 * 32 * 2 * 8 * 128
    assert decode_seconds(llama, H100, ONE, 1, 1000, BARE) == pytest.approx(read / 3350e9, rel=1e-4)


def test_one_token_reads_the_experts_that_it_is_sent_to_and_many_tokens_all():
    bare = replace(BARE, decode_step_s=0.0)
    one, many = (decode_seconds(QWEN30, H100, ONE, rows, 1, bare) * 3350e9 / 2 for rows in (1, 512))
    experts = 48 * 128 * 3 * 2048 * 768
    assert many - one == pytest.approx(experts * (1 - 8 / 128) + 511 * 48 * 2 * 4 * 128, rel=1e-3)


def test_completions_have_the_mean_that_they_are_planned_for_and_none_is_longer_than_the_longest():
    alive = share_longer(1500.0, 4096, 0.6)
    assert sum(alive(token) for token in range(4096)) == pytest.approx(1500, rel=0.01)
    assert alive(0) == pytest.approx(1) and alive(4096) == 0 and alive(1000) > alive(2000)


def test_more_slots_and_shorter_completions_are_never_slower():
    lengths = Lengths(num_completions=512, prompt=200, mean=500, longest=2000)
    seconds = [
        generation(QWEN30, H100, replace(ONE, tp=8, ep=8, slots=slots), lengths, Rates())[0] for slots in (16, 64, 512)
    ]
    assert seconds == sorted(seconds, reverse=True)
    longer = replace(lengths, mean=1000.0)
    assert generation(QWEN30, H100, replace(ONE, tp=8, ep=8), longer, Rates())[0] > seconds[1]


def test_the_parts_of_a_step_are_those_that_the_run_has():
    def parts(recipe, *overrides, server_gpus=0):
        config = load_config(RlRunConfig, RECIPES / f"{recipe}.toml", overrides)
        place = Place(ranks_per_node=8, room_bytes=inf, device=H100, server_gpus=server_gpus)
        training = training_of(config, 64)
        step = place.rl_step(training, place.workload(training))
        return step and step.parts

    grpo, ppo = parts("qwen3_30b_a3b/grpo_r2"), parts("qwen3_30b_a3b/ppo")
    assert list(grpo) == ["rollout", "logprobs and values", "updates"]
    # Values are a pass like that for the old logprobs, and the critic is updated as often as the policy.
    assert ppo["logprobs and values"] == pytest.approx(2 * grpo["logprobs and values"])
    assert ppo["critic"] == ppo["updates"] == grpo["updates"]
    served = ["rl.engine.kind=vllm", "rl.engine.tensor_parallel=4", "rl.engine.urls=[http://a:1]"]
    assert parts("qwen3_30b_a3b/grpo_r2", *served) is None
    few, many = (parts("qwen3_30b_a3b/grpo_r2", *served, server_gpus=gpus) for gpus in (8, 64))
    assert few["weights to servers"] > 0 and many["rollout"] < few["rollout"]
