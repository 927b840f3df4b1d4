import json
from dataclasses import replace

import pytest

from mcore_rl.cli.cli import run
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.planning.device import Rates
from mcore_rl.planning.estimate import calibrated, imbalance_of_run
from mcore_rl.planning.layer_times import workload_of
from mcore_rl.planning.rollout import Lengths, engine_of, forward_seconds, generation, with_lengths
from mcore_rl.planning.step import step
from mcore_rl.planning.training import training_of
from tests.unit.planning.test_command import H100, lines_of
from tests.unit.planning.test_search import RECIPES, place

PRETRAIN = load_config(PretrainConfig, RECIPES / "qwen3_30b_a3b/pretrain.toml")


def records(*measured):
    """Two slow records, as of any start, and three that differ a little."""
    return [{name: seconds * factor for name, seconds in measured} for factor in (9.0, 3.0, 0.99, 1.0, 1.02)]


def work_of(rates, config=PRETRAIN, world=16):
    return workload_of(training_of(config, world), place().device, rates)


def seconds_with(rates, config=PRETRAIN, world=16):
    return step(work_of(rates, config, world)).seconds


def supervised(seconds):
    found = records(("time/forward_backward_s", 0.9 * seconds), ("time/optimizer_s", 0.1 * seconds))
    return calibrated(training_of(PRETRAIN, 16), place(), found, "runs/mine")


@pytest.mark.parametrize("host_s", [2e-3, 7e-3])
def test_the_time_of_the_host_is_found_where_the_device_waits_for_it(host_s):
    fitted = supervised(seconds_with(Rates(host_layer_s=host_s)))
    assert fitted.host_layer_s == pytest.approx(host_s, rel=1e-3)
    assert (fitted.speed, fitted.source) == (1.0, "runs/mine")


def test_where_the_device_never_waits_its_speed_is_found_alone():
    config = load_config(PretrainConfig, RECIPES / "mixtral_8x7b/pretrain.toml")
    half = 2 * seconds_with(Rates(fixed_s=0.015), config, 64)
    found = records(("time/forward_backward_s", half))
    fitted = calibrated(training_of(config, 64), place(), found, "runs/mine")
    assert fitted.host_layer_s is None
    assert fitted.speed == pytest.approx(0.5, rel=0.02)  # latencies, which are not halved, apart


def test_a_step_slower_than_any_host_is_put_down_to_the_device_too():
    fitted = supervised(4 * seconds_with(Rates(host_layer_s=20e-3)))
    assert fitted.host_layer_s == 20e-3 and fitted.speed < 0.3


def test_the_parts_of_an_rl_step_are_factors_on_the_bound():
    config = load_config(RlRunConfig, RECIPES / "qwen3_30b_a3b/grpo_r2.toml")
    work = workload_of(training_of(config, 16), place().device, Rates())
    work = with_lengths(work, config.train.global_batch, 1024 + 3000)
    lengths = Lengths(num_completions=4096, prompt=1024, mean=3000, longest=8192)
    rollout, _ = generation(config.model, work.device, engine_of(training_of(config, 16), 0, Rates()), lengths, Rates())
    found = records(
        ("time/rollout_s", 1.5 * rollout),
        ("time/old_logprobs_s", 1.2 * 4 * forward_seconds(work)),
        ("time/forward_backward_s", 4 * step(work).seconds),
    )
    for record in found:
        record |= {"rollout/completion_tokens": 3000.0, "rollout/prompt_tokens": 1024.0}
    fitted = calibrated(training_of(config, 16), place(), found, "runs/mine")
    assert (fitted.rollout, fitted.logprobs) == (pytest.approx(1.5, rel=1e-3), pytest.approx(1.2, rel=0.01))
    assert fitted.updates == pytest.approx(1.0, rel=0.01) and fitted.speed == pytest.approx(1.0, rel=0.01)


def loads(ep, *experts):
    """Tokens by layer and expert, of three layers, of which the first is dense."""
    config = PRETRAIN.model_copy(update={"mesh": PRETRAIN.mesh.model_copy(update={"ep": ep})})
    record = {"moe/expert_load": [[0] * 8, *experts]}
    return imbalance_of_run(config.mesh.ep, [record] * 3)


def test_the_load_of_the_fullest_rank_is_that_of_its_experts_together():
    first, second = [50, 10, 10, 10, 5, 5, 5, 5], [10] * 8
    # Of four ranks with two experts each the fullest has 60 of 100 tokens, then 20 of 80: 2.4 and 1 times a quarter.
    assert loads(4, first, second) == pytest.approx((2.4 + 1.0) / 2)
    assert loads(8, first, first) == 4.0 and loads(1, first, first) is None
    assert imbalance_of_run(PRETRAIN.mesh.ep, [{}]) is None


def test_a_step_of_uneven_experts_is_not_put_down_to_the_host():
    busy = work_of(replace(Rates(), imbalance=1.5, host_layer_s=7e-3))
    seconds = step(busy).seconds
    experts = [0.0] * 128
    experts[:16] = [1.5 / 128] * 16
    experts[16:] = [(1 - 16 * 1.5 / 128) / 112] * 112
    found = records(("time/forward_backward_s", seconds))
    for record in found:
        record["moe/expert_load"] = [experts] * 48
    fitted = calibrated(training_of(PRETRAIN, 16), place(), found, "runs/mine")
    assert fitted.imbalance == pytest.approx(1.5) and fitted.host_layer_s == pytest.approx(7e-3, rel=1e-3)


def test_a_run_of_two_steps_and_a_cluster_without_a_device_calibrate_nothing():
    training = training_of(PRETRAIN, 16)
    with pytest.raises(DataError, match="has 2 records of steps"):
        calibrated(training, place(), records(("time/forward_backward_s", 1.0))[:2], "runs/mine")
    with pytest.raises(DataError, match=r"Set node\.device"):
        calibrated(training, replace(place(), device=None), [], "runs/mine")


def test_a_calibrated_cluster_plans_the_step_of_its_run(capsys, tmp_path):
    run_dir, cluster = tmp_path / "mine", tmp_path / "calibrated.toml"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump_config(PRETRAIN))
    attempt = {"started": "2026-01-01T00:00:00+00:00", "step": 0, "command": [], "commit": "", "versions": {}}
    machine = {"device": "NVIDIA H100", "ranks": 16, "cores": 8, "memory_bytes": 2**40}
    attempt |= {"machine": machine, "mesh": {"world": 16}}
    (run_dir / "run.json").write_text(json.dumps([attempt]))
    lines = [{"step": at, "time": 1.0 * at} | one for at, one in enumerate(records(("time/forward_backward_s", 20.0)))]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = lines_of(capsys, "--calibrate", str(run_dir), "--cluster", H100, "--output", str(cluster))
    assert "[rates]" in shown and any(line.startswith("host_layer_s = 0.00") for line in shown)
    assert load_config(ClusterConfig, cluster).rates.source == str(run_dir)
    planned = lines_of(capsys, "qwen3_30b_a3b/pretrain", "--cluster", str(cluster), "--nodes", "2")
    assert any(line.startswith("step    20 s (16.7-24)") for line in planned)
    assert any(line.startswith(f"range   calibrated with {run_dir}") for line in planned)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no\s+folder\s+of\s+a\s+run"):
        run(["plan", "--calibrate", str(tmp_path), "--cluster", H100])
    with pytest.raises(ConfigError, match="CONFIG is missing"):
        run(["plan", "--cluster", H100, "--nodes", "2"])
