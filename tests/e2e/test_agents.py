"""A run with an agent as a user does it: routes of the engine over segments, samples, evaluation, and a resume."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.api import read_metrics
from tests.e2e.test_rl import computed
from tests.forked import succeed

WORDS = (
    *("mesh.tp=1", "mesh.ep=1", "train.steps=8", "train.eval_interval=8", "checkpoint.interval=4"),
    *("rl.samples.interval=1", "rl.agent.sessions=4", "rl.agent.max_tokens=80", 'rl.reward.parts=["environment"]'),
    *("rl.reward.length_max_tokens=none", "rl.loss.kl_coeff=0", "rl.loss.reference_refresh_rollouts=none"),
    f"rl.rollout.stop_tokens={list(range(11, 31))}",
)


@pytest.mark.parametrize(("agent", "replay"), [("examples.agent:solve", "r3"), ("tests.sessions:compacting", "r2")])
def test_a_run_with_an_agent_is_bit_equal_after_a_resume(
    agent: str, replay: str, rl_file: Path, tmp_path: Path
) -> None:
    run_dir, words = tmp_path / "rl", [*WORDS, f"rl.agent.function={agent}", f"replay.kind={replay}"]
    succeed("mcore_rl.programs.rl", [rl_file, *words])
    wanted = computed(run_dir)
    metrics = read_metrics(run_dir)
    assert max(metrics["rollout/mismatch_max"].values()) < 1e-4
    assert set(metrics["environment/ended_failed_fraction"].values()) == {0.0}
    assert min(metrics["environment/turns"].values()) >= 2
    assert "eval/reward" in metrics
    samples = [json.loads(line) for line in (run_dir / "samples/step_0000000.jsonl").read_text().splitlines()]
    assert all(len(one["spans"]) == 2 + len(one.get("segments", ())) for one in samples)
    assert all(one["turns"][-1]["role"] == "assistant" for one in samples)
    assert any("segments" in one for one in samples) == (agent == "tests.sessions:compacting")
    if replay == "r3":
        assert max(metrics["rollout_routes/disjoint_fraction"].values()) == 0.0

    shutil.rmtree(run_dir / "checkpoints/iter_0000008")
    (run_dir / "DONE").unlink()
    succeed("mcore_rl.programs.rl", [rl_file, *words])
    assert computed(run_dir) == wanted
