import json

from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.planning.memory import memory_of_fullest_rank
from mcore_rl.planning.training import training_of
from mcore_rl.report.runs import read_run
from mcore_rl.report.summary import numbers, size
from tests.unit.planning.test_search import RECIPES


def rows_of(folder, device):
    config = load_config(PretrainConfig, RECIPES / "mixtral_8x7b/pretrain.toml")
    (folder / "config.toml").write_text(dump_config(config))
    attempt = {"started": "2026-01-01T00:00:00+00:00", "step": 0, "command": [], "commit": "", "versions": {}}
    machine = {"device": device, "ranks": 64, "cores": 8, "memory_bytes": 2**40}
    attempt |= {"machine": machine, "mesh": {"world": 64}}
    (folder / "run.json").write_text(json.dumps([attempt]))
    step = {"time/forward_backward_s": 3.0, "time/optimizer_s": 0.25, "memory/peak_device_bytes": 50 * 2**30}
    lines = [json.dumps({"step": at, "time": float(at)} | step) for at in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return dict(numbers([read_run(folder, "mine")])), memory_of_fullest_rank(training_of(config, 64)).total


def test_time_and_memory_of_a_run_stand_beside_what_was_planned(tmp_path):
    rows, planned_bytes = rows_of(tmp_path, "NVIDIA H100 80GB HBM3")
    # The step that `mcore-rl plan` gives for this recipe on 64 H100, whose published speed is 5,871 tokens/s.
    (step,), (memory,) = rows["a step, measured; planned"], rows["device memory, measured; planned"]
    assert step.startswith("3.25 s; 2.9") and step.endswith(")")
    assert memory == f"{size(50.0 * 2**30)}; {size(float(planned_bytes))}"


def test_nothing_is_planned_for_a_device_that_no_table_has(tmp_path):
    rows, _ = rows_of(tmp_path, "x86_64")
    assert "a step, measured; planned" not in rows and "device memory, measured; planned" not in rows
