"""A run with an environment as a user does it: R3 over turns, step rewards, samples, and a resume."""

import json
import shutil
from pathlib import Path

from mcore_rl.api import read_metrics
from tests.e2e.test_rl import computed
from tests.emitted import assert_emitted
from tests.forked import succeed

WORDS = (
    *("mesh.tp=1", "mesh.ep=1", "train.steps=8", "train.eval_interval=8", "checkpoint.interval=4", "replay.kind=r3"),
    *("rl.samples.interval=1", "rl.environment.name=examples.environment:Retry", "rl.environment.arguments={tries=2}"),
    *("rl.environment.max_turns=3", "rl.environment.max_tokens=64", 'rl.reward.parts=["positions","environment"]'),
    *("rl.reward.length_max_tokens=none", "rl.loss.kl_coeff=0", "rl.loss.reference_refresh_rollouts=none"),
    # Ids of letters: most turns of a policy that knows nothing end in time.
    *("rl.advantage.kind=steps", f"rl.rollout.stop_tokens={list(range(11, 31))}", "rl.update.epochs=2"),
)


def test_a_run_with_turns_replays_their_routes_shows_them_and_is_bit_equal_after_a_resume(
    rl_file: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "rl"
    succeed("mcore_rl.programs.rl", [rl_file, *WORDS])
    wanted = computed(run_dir)
    metrics = read_metrics(run_dir)
    assert_emitted("rl with an environment", run_dir)
    # Old logprobs are of a pass over whole conversations; the engine's are of their turns, each by itself.
    assert max(metrics["rollout/mismatch_max"].values()) < 1e-4
    assert max(metrics["environment/turns"].values()) > 1.2
    assert set(metrics["environment/ended_failed_fraction"].values()) == {0.0}
    assert "eval/accuracy" in metrics
    samples = [json.loads(line) for line in (run_dir / "samples/step_0000000.jsonl").read_text().splitlines()]
    several = [one for one in samples if sum(turn["role"] == "assistant" for turn in one["turns"]) == 2]
    assert several
    for one in several:
        roles = [turn["role"] for turn in one["turns"]]
        assert roles[:4] == ["user", "assistant", "user", "assistant"]
        assert one["turns"][2]["content"].endswith(" right=")
        assert one["completion"] == one["turns"][3]["content"] and one["turns"][3]["reward"] in (0.0, 1.0)
        assert one["end"] in ("done", "length", "turns")

    shutil.rmtree(run_dir / "checkpoints/iter_0000008")
    (run_dir / "DONE").unlink()
    before = len((run_dir / "metrics.jsonl").read_text().splitlines())
    succeed("mcore_rl.programs.rl", [rl_file, *WORDS])
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) > before
    assert computed(run_dir) == wanted
