"""The times of the planned schedule against closed forms, and its order against Megatron's table."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from bench.plan import QWEN30, RECIPES, RUNS, errors, fit, held_out, predicted
from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.preferences import RewardModelConfig
from mcore_rl.planning.device import DEVICES, SENSITIVITIES, Rates, span_of_step
from mcore_rl.planning.flops import forward_flops_per_token, train_flops_per_token
from mcore_rl.planning.layer_times import Roofline, Workload, layer_times, output_times, workload_of
from mcore_rl.planning.step import (
    chunks_in_flight,
    imbalance_costs,
    model_tflops,
    most_kept,
    schedule,
    sensitivities,
    simulate,
    simulate_mesh,
    step,
    tokens_per_s,
    unit_times,
)
from mcore_rl.planning.training import training_of

MOE = LayerKind("attention", True)
FREE_HOST = Rates(host_layer_s=0.0, host_expert_s=0.0, fixed_s=0.0)


def work(**changes):
    settings = {
        "model": QWEN30,
        "mesh": MeshConfig(ep=8),
        "device": DEVICES["H100"],
        "world_size": 16,
        "seq_length": 4096,
        "micro_batch": 1,
        "global_batch": 256,
    }
    return Workload(**settings | changes)


def test_steps_of_published_runs_are_predicted_within_the_stated_error():
    found = errors(RUNS)
    assert len(found) == 18
    assert statistics.median(found) <= 1.15
    # The range that `mcore-rl plan` prints for a known family and device.
    span = span_of_step(1.0, "mixtral", "H100")
    assert max(found) <= span.high == pytest.approx(1 / span.low)


@pytest.mark.full
def test_runs_of_a_family_that_no_rate_was_fitted_to_are_predicted_within_the_stated_error():
    ratios = held_out()
    assert set(ratios) == {run.name for run in RUNS}
    found = [max(ratio, 1 / ratio) for ratio in ratios.values()]
    assert statistics.median(found) <= 1.30
    span = span_of_step(1.0, "gpt_oss", "H100")
    assert max(found) <= min(span.high, 1 / span.low)


@pytest.mark.full
def test_a_fit_finds_the_speeds_that_made_the_steps():
    works = [run.workload() for run in RUNS[:4]]
    made = Rates(products=0.5, hbm=0.8, host_layer_s=1e-3)
    rates = fit(works, [predicted(work, made) for work in works])
    assert [predicted(work, rates) / predicted(work, made) for work in works] == pytest.approx([1.0] * 4, rel=0.02)


def test_a_large_product_takes_its_flops_at_the_given_part_of_the_peak():
    roof = Roofline(work(rates=Rates(products=0.5, hbm=1e9)))
    # 8192 rows and columns are 4096 tiles: 31 waves on 132 multiprocessors, taken as full.
    seconds = roof.product(8192, 8192, 65536, fp8=False)
    assert seconds == pytest.approx(2 * 8192 * 8192 * (65536 + 256) / (989.4e12 * 0.5))


def test_a_small_product_takes_its_bytes():
    roof = Roofline(work(rates=Rates(products=1e9, hbm=1.0)))
    assert roof.product(128, 256, 512, fp8=False) == pytest.approx(2 * (128 * 512 + 256 * 512 + 128 * 256) / 3.35e12)


def test_a_ring_moves_all_but_the_own_part_over_the_slower_of_the_links():
    roof = Roofline(work(rates=Rates(link=1.0, nic=1.0, link_latency_s=0.0, nic_latency_s=0.0)))
    assert roof.ring(8e9, 8) == pytest.approx(8e9 * 7 / 8 / 450e9)
    # Neighbours 8 apart are on other nodes, each with one adapter of 50 GB/s.
    assert roof.ring(8e9, 2, 8) == pytest.approx(8e9 / 2 / 50e9)


def test_deepep_sends_a_token_once_to_a_node():
    quiet = Rates(nic=1.0, link=1e9, nic_latency_s=0.0, link_latency_s=0.0)
    wide = {"mesh": MeshConfig(ep=16), "rates": quiet}
    plain, once = (Roofline(work(deepep=deepep, **wide)).dispatch() for deepep in (False, True))
    assert plain == pytest.approx(4096 * 8 * 2048 * 2 / 2 / 50e9)
    # Of 8 picks on two nodes, 2 (1 - 1 / 2^8) nodes are reached.
    assert once / plain == pytest.approx(2 * (1 - 2**-8) / 8)


def test_without_a_host_the_parts_are_the_whole_layer_and_full_recomputation_adds_a_forward_pass():
    plain = layer_times(work(rates=FREE_HOST), MOE)
    assert plain.forward + plain.backward == pytest.approx(sum(plain.parts.values()))
    again = layer_times(work(rates=FREE_HOST, recompute="full"), MOE)
    assert again.backward - plain.backward == pytest.approx(plain.forward)


def test_the_bubble_is_that_of_the_schedule():
    """Equal stages: (pp - 1) / vpp stages of idle time (arXiv 2104.04473), when messages take no time."""
    rates = replace(FREE_HOST, nic=1e9, link=1e9, nic_latency_s=0.0)
    mesh = MeshConfig(pp=4, vpp=3)
    parts = step(work(mesh=mesh, rates=rates)).parts
    layer = layer_times(work(mesh=mesh, rates=rates), MOE)
    # The last stage is longer by the output, so that the other three wait for it as well.
    assert parts["bubble"] == pytest.approx(3 * 12 * (layer.forward + layer.backward) / 3, rel=1e-6)


def test_perfect_rates_reach_no_more_than_the_peak():
    perfect = Rates(products=1.0, attention=1.0, attention_backward=1.0, hbm=1.0, link=1.0, nic=1.0)
    busy = work(rates=perfect, micro_batch=4)
    assert 300 < model_tflops(busy, step(busy).seconds) < 989.4
    assert sum(forward_flops_per_token(QWEN30, 4096).values()) > 0


def test_nothing_that_is_given_for_free_makes_a_step_slower_and_imbalance_always_does():
    gains = sensitivities(work())
    assert {one.term for one in gains} == set(SENSITIVITIES)
    assert all(one.gain > -1e-9 for one in gains) and gains == sorted(gains, key=lambda one: -one.gain)
    costs = imbalance_costs(work(), (1.0, 1.3, 2.0))
    assert costs[0] == 0 and 0 <= costs[1] <= costs[2] < 1


def test_a_faster_device_is_never_slower():
    speeds = [
        tokens_per_s(w, step(w).seconds) for w in (work(device=DEVICES[name]) for name in ("A100", "H100", "B200"))
    ]  # fmt: skip
    assert speeds == sorted(speeds)


LORA = LoraConfig(rank=16)


def test_a_frozen_weight_has_no_product_for_its_gradient():
    forward, backward = Roofline(work()).linear(8192, 8192, 8192)
    assert backward == pytest.approx(2 * forward)
    assert Roofline(work(lora=LORA)).linear(8192, 8192, 8192) == pytest.approx((forward, forward))


def test_adapters_take_the_bytes_of_two_small_products_and_a_sum():
    rows, columns, inner = 8192, 2048, 4096
    roof = Roofline(work(lora=LORA, rates=Rates(products=1e9, hbm=1.0)))
    low = rows * inner + 3 * 16 * inner + rows * 3 * 16
    high = rows * 16 + columns * 16 + rows * columns
    forward = low + high + 3 * rows * columns
    # Each product has two for its gradients. The gradient is read and scaled, the input's is read twice and summed.
    backward = 2 * (low + high) + 2 * rows * columns + 3 * rows * inner
    found = roof.adapter("attention", (rows, rows), columns, inner, blocks=3)
    assert found == pytest.approx((2 * forward / 3.35e12, 2 * backward / 3.35e12))
    assert roof.adapter("mlp", (rows, rows), columns, inner) == (0, 0)  # this model has none


def test_gradients_and_flops_of_a_step_are_those_of_its_adapters():
    tuned = work(lora=LORA, overlap_dp=False)
    dense = 48 * 16 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048)
    expert = 48 * 16 * 2 * (2048 + 1536 + 768 + 2048)  # 16 of 128 experts on a rank, each with rank 16 / 8
    roof = Roofline(tuned)
    exchange = roof.ring(4 * dense, 16) + roof.ring(4 * expert, 2, 8)
    assert step(tuned).parts["gradients"] == pytest.approx(exchange)
    ratio = train_flops_per_token(QWEN30, 4096, LORA) / train_flops_per_token(QWEN30, 4096)
    assert model_tflops(tuned, 1.0) == pytest.approx(ratio * model_tflops(work(), 1.0))
    span = span_of_step(10.0, "qwen3_moe", "H100", has_adapters=True)
    assert "adapters of qwen3_moe on H100" in span.reason and span.high == 17


def test_pairs_are_packed_as_long_as_they_may_be():
    """64 pairs are 128 answers of 4096 tokens, four in each row of 16384: 32 rows over 4 data-parallel ranks."""
    config = load_config(RewardModelConfig, RECIPES / "qwen3_30b_a3b/rm.toml")
    assert (config.train.global_batch, config.data.seq_length, config.packed_length) == (64, 4096, 16384)
    pairs = workload_of(training_of(config, 16), DEVICES["H100"], Rates())
    assert (pairs.global_batch, pairs.num_microbatches, pairs.sample_length) == (32, 8, 4096)
    # A scalar head is a product with one column.
    assert sum(output_times(pairs)) < 0.01 * sum(output_times(work(seq_length=16384)))


def test_an_unknown_family_or_device_widens_the_range():
    known, other = span_of_step(10.0, "qwen3_moe", "H100"), span_of_step(10.0, "olmoe", "MI300X")
    assert other.low < known.low < 10 < known.high < other.high
    assert "olmoe on MI300X" in other.reason


SHAPES = ((4, 1, 8), (4, 1, 2), (8, 1, 8), (4, 2, 8), (4, 2, 4), (4, 4, 8), (8, 3, 16), (2, 2, 4))


def of_mesh(pp, vpp, num_microbatches, message_s=0.0, backward_s=2.0, overlap=None):
    passes = [schedule(pp, vpp, num_microbatches, stage) for stage in range(pp)]
    return simulate(
        passes,
        lambda kind, stage, chunk: (1.0 if kind == "F" else backward_s) / vpp,
        message_s,
        overlap=vpp > 1 if overlap is None else overlap,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_chunks_and_free_messages_give_the_bubble_and_the_chunks_of_the_closed_forms(shape):
    pp, vpp, num_microbatches = shape
    result = of_mesh(*shape)
    assert result.bubble == pytest.approx((pp - 1) / (num_microbatches * vpp + pp - 1))
    mesh = MeshConfig(pp=pp, vpp=vpp)
    assert result.alive == [chunks_in_flight(mesh, stage, num_microbatches) for stage in range(pp)]


@pytest.mark.parametrize("shape", [(4, 1, 8), (4, 2, 64), (2, 3, 30), (8, 4, 128)], ids=str)
def test_the_most_that_unequal_chunks_keep_is_that_of_the_whole_schedule(shape):
    pp, vpp, num_microbatches = shape
    kept = [3, 1, 4, 1][:vpp]
    for stage in range(pp):
        now, all_of_them = 0, []
        for kind, chunk, _ in schedule(*shape, stage):
            now += kept[chunk] if kind == "F" else -kept[chunk]
            all_of_them.append(now)
        assert now == 0
        assert most_kept(MeshConfig(pp=pp, vpp=vpp), stage, num_microbatches, kept) == max(all_of_them)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1], ids=str)
def test_interleaved_passes_come_in_the_order_of_megatrons_table(shape):
    pp, vpp, num_microbatches = shape
    table = [(chunk, microbatch) for microbatch, chunk in get_schedule_table(num_microbatches, vpp, pp)]
    for stage in range(pp):
        passes = schedule(*shape, stage)
        assert [(chunk, microbatch) for kind, chunk, microbatch in passes if kind == "F"] == table
        backward = [(vpp - 1 - chunk, microbatch) for kind, chunk, microbatch in passes if kind == "B"]
        assert backward == table
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp)
        _, are_all, warmup, _ = get_pp_rank_microbatches(num_microbatches, vpp, pp, p2p_communicator=communicator)
        # After the warm-up every forward pass is followed by a backward pass.
        first_backward = [kind for kind, *_ in passes].index("B")
        assert first_backward == warmup + (not are_all)
        steady = [kind for kind, *_ in passes[warmup:]]
        assert "".join(steady) == "FB" * (len(table) - warmup) + "B" * warmup


def test_messages_are_not_free_and_more_of_them_is_never_faster():
    # Recorded from Megatron's 1F1B, whose stages wait for their messages: 0.345 where the formula says 0.304.
    assert of_mesh(8, 1, 16, 0.1).bubble == pytest.approx(0.345, abs=5e-4)
    assert of_mesh(8, 4, 16, 0.025).bubble == pytest.approx(0.124, abs=5e-4)
    seconds = [of_mesh(8, 1, 16, message_s).seconds for message_s in (0.0, 0.05, 0.1, 1.0)]
    assert seconds == sorted(seconds)


def test_a_longer_last_stage_keeps_the_others_waiting():
    model = ModelConfig(num_layers=10)
    mesh = MeshConfig(pp=4, first_stage_layers=2, last_stage_layers=4)
    result = simulate_mesh(unit_times(model, mesh), mesh, 16)
    assert result.busy_s == [96, 96, 96, 192]
    # Each of the others once forwards before the last one begins, and once backwards after it.
    assert result.seconds == 192 + 3 * 2 * 3
