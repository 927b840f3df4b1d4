"""A refused resume leaves the run as it was; an accepted one records what changed; a sick run is not done."""

import json
from pathlib import Path

from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import ConfigError, TrainingError
from mcore_rl.programs.pretrain import train
from tests.ranks import run_ranks


def outcome(config: PretrainConfig) -> str:
    """On a rank: the error with which a training ends; "" for none."""
    try:
        train(config)
    except (ConfigError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_changes_are_refused_or_recorded_and_a_run_that_ends_in_skipped_steps_is_not_done(
    config_file: Path, tmp_path: Path
) -> None:
    """On one rank, two steps; then two more with another seed and a rate at which the weights leave every bound."""

    def started(*fields: str) -> str:
        config = load_config(PretrainConfig, config_file, ["mesh.tp=1", "mesh.ep=1", "platform.layers=auto", *fields])
        return str(run_ranks(outcome, 1, config)[0])

    run = tmp_path / "run"
    assert started("train.eval_batches=none", "train.steps=2", "train.gc_interval=1") == ""
    (first,) = json.loads((run / "run.json").read_text())
    assert first["speed"] == {
        "overlap_grad_reduce": False, "overlap_param_gather": False, "overlap_shared_experts": False,
        "permute_fusion": False, "router_fusion": False, "cross_entropy_fusion": "none",
        "weight_gradient_fusion": False, "fp8_recipe": "none", "gc_interval": 1,
    }  # fmt: skip
    assert '"event": "speed: on: gc_interval=1; off: overlap_grad_reduce, ' in (run / "metrics.jsonl").read_text()
    before = (run / "config.toml").read_bytes()
    # The run was started where there is no compiler.
    (attempt,) = json.loads((run / "run.json").read_text())
    assert attempt["layers"].startswith("cpu ")
    (run / "run.json").write_text(json.dumps([attempt | {"layers": "torch"}]))
    (run / "DONE").unlink()

    more = ["train.eval_batches=none", "train.steps=4", "train.seed=7", "optim.lr=1e30"]
    refused = started(*more)
    assert refused.startswith("ConfigError: ") and "- train.seed is 1234 there, 7 here" in refused
    assert (run / "config.toml").read_bytes() == before and len(json.loads((run / "run.json").read_text())) == 1

    allowed = [*more, 'checkpoint.allow_changes=["train.seed"]']
    skipped = "TrainingError: the last 1 of 4 steps were skipped, as their gradients were not finite"
    assert started(*allowed).startswith(skipped)
    assert not (run / "DONE").exists() and (run / "checkpoints/iter_0000002").exists()
    recorded = json.loads((run / "run.json").read_text())[-1]
    assert (recorded["step"], recorded["changes"]) == (
        2,
        ["optim.lr is 0.003 there, 1e+30 here", "train.steps is 2 there, 4 here", "train.seed is 1234 there, 7 here"],
    )
    assert recorded["layers"] == "torch" and recorded["warnings"] == []
    assert "seed = 7" in (run / "config.toml").read_text()
    # Nothing is left to do, and the run is no sounder.
    assert started(*allowed).startswith(skipped) and not (run / "DONE").exists()
