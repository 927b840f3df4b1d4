"""The examples: each does what it promises, in numbers made by hand, and in a training that names it."""

import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import tensor

from examples.advantage import median_centered
from examples.environment import Retry
from examples.family import BiasedQwen3Moe
from examples.loss import vespo
from examples.reward import brevity
from examples.task import count_ones
from mcore_rl.api import is_done, read_metrics
from mcore_rl.families import family_of
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.step.losses import PolicyTokens
from mcore_rl.rl.types import Problem
from mcore_rl.storage.checkpoint import read_marker
from tests.e2e.conftest import Finished
from tests.forked import run_main, succeed
from tests.parallel.example_step import step_of_example, step_of_trainer
from tests.ranks import run_ranks
from tests.sections import advantage_config, loss_config
from tests.tiny_models import TINY

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ALONE = ("mesh.tp=1", "mesh.ep=1")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (100 if path.name == "grpo_step.py" else 40)


def test_brevity_falls_from_1_at_the_reference_to_0_at_four_times_its_length() -> None:
    def reward(completion: str, is_truncated: bool = False) -> float:
        return brevity(
            RewardInput(
                prompt="", completion=completion, answer="ab", num_tokens=1, is_truncated=is_truncated, fields={}
            )
        )

    assert [reward("x" * length) for length in (1, 2, 5, 8, 20)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert reward("ab", is_truncated=True) == 0.0


def test_the_example_of_a_loss_weighs_gradients_as_vespo_does() -> None:
    logprobs_T = tensor([-0.2, -0.3, -0.1], requires_grad=True)
    tokens = PolicyTokens(
        logprobs_T=logprobs_T,
        entropy_T=torch.zeros(3),
        old_logprobs_T=torch.zeros(3),
        reference_logprobs_T=None,
        rollout_logprobs_T=None,
        advantages_T=tensor([2.0, 2.0, 2.0]),
        mask_T=torch.ones(3, dtype=torch.bool),
        loss_weights_T=torch.ones(3),
        sequence_T=torch.zeros(3, dtype=torch.long),
        lengths_N=tensor([3]),
    )
    loss = vespo(tokens, loss_config(), Axis(None, 0, 1))  # type: ignore[arg-type]
    loss.loss_T.sum().backward()
    assert logprobs_T.grad is not None
    # The paper's weight of A grad log p, with the ratio of the whole sequence: (2, 3) as all advantages are positive.
    ratio = math.exp(float((tokens.logprobs_T - tokens.old_logprobs_T).detach().sum()))
    gate = ratio**2 * math.exp(3 * (1 - ratio))
    torch.testing.assert_close(logprobs_T.grad, -gate * tokens.advantages_T, rtol=1e-6, atol=0)
    assert not loss.clipped_low_T.any() and not loss.clipped_high_T.any()


def test_the_median_is_the_zero_of_the_advantages() -> None:
    rewards_PG = tensor([[0.0, 1.0, 5.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    wanted_PG = tensor([[-0.6, 0.0, 2.4], [0.0, 0.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(
        median_centered(rewards_PG, advantage_config(eps=0.0), rewards_PG[:, :, None]), wanted_PG
    )


def test_ones_are_counted() -> None:
    problems = [count_ones(random.Random(seed), 6) for seed in range(5)]
    assert all(problem.answer == str(problem.prompt.count("1")) for problem in problems)
    assert {len(problem.prompt) for problem in problems} == {7}


def test_each_try_is_told_how_many_characters_were_right() -> None:
    environment = Retry(tries=2)
    problem = Problem(problem_id="p", prompt="123=", answer="321")
    assert environment.start(problem) == [{"role": "user", "content": "123="}]
    assert environment.step("331") == ([{"role": "user", "content": "2 right="}], 0.0, False)
    assert environment.step(" 321\n") == ([], 1.0, True)
    assert environment.step("") == ([{"role": "user", "content": "0 right="}], 0.0, True)


def test_the_family_has_biases_where_its_base_has_none() -> None:
    model = TINY["qwen3_moe"].model_copy(update={"family": "examples.family:BiasedQwen3Moe"})
    family = family_of(model)
    assert isinstance(family, BiasedQwen3Moe)
    assert family.architecture(model)["add_qkv_bias"]
    assert family.to_hf(model)["attention_bias"] is False


@pytest.mark.full
def test_an_rl_run_uses_and_records_all_of_them(
    rl_file: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    fields = {
        "model.family": "examples.family:BiasedQwen3Moe",
        "rl.prompts.task": "examples.task:count_ones",
        "rl.reward.parts": '["length", "examples.reward:brevity", "environment"]',
        "rl.environment.name": "examples.environment:Retry",
        "rl.environment.max_tokens": "48",
        "rl.advantage.kind": "examples.advantage:median_centered",
        "rl.loss.kind": "examples.loss:vespo",
    }
    words = [f"{key}={value}" for key, value in fields.items()]
    finished = mcore_rl("rl", rl_file, *ALONE, "train.steps=4", *words)
    assert finished.returncode == 0, finished.stderr
    metrics = read_metrics(tmp_path / "rl")
    assert metrics["reward/part/examples.reward:brevity"].keys() == {2, 4}
    assert set(metrics["policy/clip_ratio_low"].values()) == {0.0}
    samples = (tmp_path / "rl/samples/step_0000000.jsonl").read_text().splitlines()
    assert set(json.loads(samples[0])["prompt"]) <= set("01=")
    recorded = json.loads((tmp_path / "rl/run.json").read_text())[-1]["extensions"]
    for name in ("advantage", "environment", "family", "loss", "reward", "task"):
        digest = hashlib.sha256((ROOT / f"examples/{name}.py").read_bytes()).hexdigest()
        assert [found for key, found in recorded.items() if key.startswith(f"examples.{name}:")] == [digest]
    # A resume compares them with those of its checkpoint.
    assert read_marker(tmp_path / "rl/checkpoints/iter_0000004").inputs["code"] == recorded


@pytest.mark.full
def test_a_training_from_python_learns(tmp_path: Path) -> None:
    texts = [ROOT / "README.md", ROOT / "docs/slurm.md"]
    done = succeed("tests.script", [ROOT / "examples/train.py", tmp_path, *texts])
    losses = read_metrics(tmp_path / "run")["train/loss_nats"]
    assert is_done(tmp_path / "run")
    assert losses[20] < losses[1] - 0.5
    assert done.stdout.endswith(f"{losses[20]:.3f} nats a token\n")


@pytest.mark.full
def test_under_a_launcher_every_rank_calls_train(config_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "train_on_rank.py"
    script.write_text(
        "import sys\nfrom mcore_rl.api import train\n"
        "train('pretrain', sys.argv[1], {'train.steps': 2, 'train.eval_batches': None})\n"
    )
    succeed("tests.script", [script, config_file], 2)
    assert is_done(tmp_path / "run") and read_metrics(tmp_path / "run")["train/loss_nats"].keys() == {1, 2}


def test_the_step_of_the_example_is_that_of_the_trainer(tmp_path: Path) -> None:
    """Rewards rise; every weight is RlTrainer's, with the routes of the old policy's pass imposed on both updates."""
    [(initial, found, (before, after))] = run_ranks(step_of_example, 1)
    [wanted] = run_ranks(step_of_trainer, 1, tmp_path / "run")
    assert after > before + 0.02
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert float((weight - wanted[name]).abs().max()) < 1e-7, name
        assert float((weight - initial[name]).abs().max()) > 1e-4, name
    assert read_metrics(tmp_path / "run")["routes/changed_fraction"].keys() == {1, 2}
    done = run_main("tests.script", [ROOT / "examples/grpo_step.py"])
    assert done.stdout == f"mean reward {before:.3f}, after one step {after:.3f}\n", done.stderr
