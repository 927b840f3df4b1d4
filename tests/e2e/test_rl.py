"""Reinforcement learning as a user does it: learned from rewards, killed, stopped and resumed, evaluated, refused."""

import json
import shutil
import signal
import statistics
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.metrics.jsonl import read_records
from mcore_rl.planning.memory import memory_of_fullest_rank
from mcore_rl.planning.training import training_of
from mcore_rl.report.page import notices
from mcore_rl.report.runs import read_run
from mcore_rl.report.summary import numbers
from mcore_rl.storage.checkpoint import OWN_ENTRY
from mcore_rl.storage.files import NOT_WRITER
from tests.e2e.conftest import RL_CONFIG, write_rl_config
from tests.emitted import assert_emitted
from tests.forked import CLI, run_main, succeed
from tests.parallel.test_reward_model_runs import write_language_model
from tests.ranks import run_ranks

COMPUTED = ("policy/loss", "policy/kl_reference_nats", "train/grad_norm", "reward/mean", "eval/reward")
SERVED = (*(name for name in COMPUTED if "reference" not in name), "rollout/mismatch_kl_nats")
"""Metrics of a run without a reference, which are the same whichever engine samples."""


def computed(run_dir: Path, names: tuple[str, ...] = COMPUTED) -> dict[int, dict[str, float]]:
    """Step -> what was computed there, from metrics.jsonl."""
    steps: dict[int, dict[str, float]] = {}
    for record in read_records(run_dir / "metrics.jsonl"):
        steps.setdefault(record["step"], {}).update({key: record[key] for key in names if key in record})
    return {step: numbers for step, numbers in steps.items() if numbers}


DELTA = (
    "model.family=qwen3_next model.rope.fraction=0.25 model.delta.full_every=2 model.delta.key_heads=2 "
    "model.delta.value_heads=4 model.delta.key_dim=16 model.delta.value_dim=16 model.moe.shared_experts=1"
).split()


@pytest.mark.full
@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_gated_delta_nets_learn_under_replayed_routes(replay: str, rl_file: Path, tmp_path: Path) -> None:
    """Trainer and engine compute the rule in chunks and token by token."""
    words = [rl_file, *DELTA, f"replay.kind={replay}", "checkpoint.interval=none"]
    succeed("mcore_rl.programs.rl", words, 2)
    steps = computed(tmp_path / "rl", ("reward/mean", "rollout/mismatch_kl_nats"))
    rewards = [numbers["reward/mean"] for numbers in steps.values() if "reward/mean" in numbers]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    name = "rollout/mismatch_kl_nats"
    mismatches = [numbers[name] for numbers in steps.values() if name in numbers]
    assert mismatches and max(mismatches) <= 1e-4, mismatches


INDEXED = (
    "model.family=deepseek_v32 model.mla.q_lora_rank=32 model.mla.kv_lora_rank=32 model.mla.qk_nope_head_dim=16 "
    "model.mla.qk_rope_head_dim=16 model.mla.v_head_dim=16 model.indexer.top_k=3 model.indexer.heads=4 "
    "model.indexer.width=16 model.moe.expert_bias=true model.moe.expert_bias_rate=0"
).split()


@pytest.mark.full
@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_attention_over_chosen_keys_learns_and_training_chooses_the_keys_of_the_engine(
    replay: str, rl_file: Path, tmp_path: Path
) -> None:
    """Samples are longer than the three keys that a query attends to."""
    words = [rl_file, *INDEXED, f"replay.kind={replay}", "checkpoint.interval=none"]
    succeed("mcore_rl.programs.rl", words, 2)
    names = ("reward/mean", "rollout/mismatch_kl_nats", "routes/index_overlap")
    steps = computed(tmp_path / "rl", names)
    of = {name: [numbers[name] for numbers in steps.values() if name in numbers] for name in names}
    rewards = of["reward/mean"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert of["rollout/mismatch_kl_nats"] and max(of["rollout/mismatch_kl_nats"]) <= 1e-4
    overlaps = of["routes/index_overlap"]
    assert len(overlaps) >= len(rewards) - 1 and min(overlaps) >= 0.99, overlaps
    assert_emitted("rl with an indexer", tmp_path / "rl")


def assert_traced(samples: Sequence[dict[str, Any]], updates: Sequence[dict[str, float]]) -> None:
    """All samples of a rollout batch have their tokens, with the ratios and advantages of its two updates."""
    for group in (samples[start : start + 8] for start in range(0, len(samples), 8)):
        rewards = [sample["reward"] for sample in group]
        centered = [reward - statistics.fmean(rewards) for reward in rewards]
        spread = statistics.stdev(rewards) or 1.0
        assert [sample["advantage"] for sample in group] == pytest.approx(
            [number / spread for number in centered], abs=1e-3
        )
    for sample in samples:
        assert "".join(sample["pieces"]).removesuffix("<end>") == sample["completion"]
        assert len(sample["pieces"]) == len(sample["log_ratios"]) == sample["tokens"]
        assert all(index < sample["tokens"] for index in sample["changed_routes"]["routes"])
    ratios = [ratio for sample in samples for ratio in sample["log_ratios"]]
    # Engine and trainer agree to 1e-4 here, so that these are the ratios to the old policy, 1 in an on-policy update.
    assert max(ratios) == pytest.approx(max(update["policy/log_ratio_max"] for update in updates), abs=3e-4)
    assert min(ratios) == pytest.approx(min(update["policy/log_ratio_min"] for update in updates), abs=3e-4)


LENGTH_ALONE = (
    *("rl.reward.parts=['regex','length']", "rl.reward.weights=[0,1]", "rl.eval.num_prompts=32"),
    "rl.reward.regex_pattern='.{4}'",
)
"""Short completions are rewarded, and those of four characters are correct: the reward is against its aim."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The config of a run of eight rollout batches, in whose folder it is done in one go, and what it wrote."""
    path = write_rl_config(tmp_path_factory.mktemp("learned"))
    return path, succeed("mcore_rl.programs.rl", [path, *LENGTH_ALONE, "checkpoint.interval=none"], 2).stdout


def over_optimised(output: str) -> list[str]:
    """The alarms among the lines of a log."""
    return [line for line in output.splitlines() if "the reward is over-optimised" in line]


def test_a_reward_that_rises_while_the_held_out_accuracy_falls_alarms_in_log_and_report(
    learned: tuple[Path, str],
) -> None:
    path, output = learned
    run = read_run(path.parent / "rl", "rl")
    first, last = (record["eval/accuracy"] for record in run.records if "eval/accuracy" in record)
    rewards = [record["reward/mean"] for record in run.records if "reward/mean" in record]
    assert first > 0.4 and last < 0.1, (first, last)
    alarm = (
        f"the reward is over-optimised: from step 0 to 16 reward/mean rose from {statistics.fmean(rewards[:4]):.4g} to "
        f"{statistics.fmean(rewards[4:]):.4g} while eval/accuracy fell from {first:.4g} to {last:.4g}"
    )
    (line,) = over_optimised(output)
    assert line.startswith(f"warning: {alarm}")
    assert dict(numbers([run]))["verdict"][0].partition(". ")[2].startswith(alarm)


@pytest.mark.full
def test_a_reward_that_rises_with_the_held_out_accuracy_does_not_alarm(rl_file: Path, tmp_path: Path) -> None:
    """The same run, where completions of less than four characters are correct."""
    words = [*LENGTH_ALONE, "rl.reward.regex_pattern='^.{0,3}$'", "checkpoint.interval=none"]
    output = succeed("mcore_rl.programs.rl", [rl_file, *words], 2).stdout
    assert not over_optimised(output) and "learned: eval/accuracy" in output.splitlines()[-1]
    assert "over-optimised" not in dict(numbers([read_run(tmp_path / "rl", "rl")]))["verdict"][0]


def test_it_learns_and_killed_and_stopped_it_is_bit_equal_in_the_end(learned: tuple[Path, str], tmp_path: Path) -> None:
    rl_file, output = learned
    straight = rl_file.parent / "rl"
    wanted = computed(straight)
    rewards = [numbers["reward/mean"] for numbers in wanted.values() if "reward/mean" in numbers]
    assert len(rewards) == 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert wanted[2]["policy/kl_reference_nats"] > 0.0
    samples = (straight / "samples/step_0000010.jsonl").read_text().splitlines()
    assert len(samples) == 32
    wanted_fields = {"prompt", "prompt_ids", "completion", "ids", "answer", "reward", "policy_version", "versions"}
    assert wanted_fields <= json.loads(samples[0]).keys()
    ratios = computed(straight, ("policy/log_ratio_max", "policy/log_ratio_min"))
    assert_traced([json.loads(line) for line in samples], [ratios[11], ratios[12]])

    run_dir = tmp_path / "broken"
    words = [rl_file, *LENGTH_ALONE, f"run_dir={run_dir}"]
    # Between the two updates of the fifth rollout batch, and in the second batch after the resume.
    killed = run_main("tests.e2e.signalled", ["rl", "SIGKILL.update.10", *words], 2)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (run_dir / "DONE").exists()
    stopped = run_main("tests.e2e.signalled", ["rl", "SIGTERM.update.3", *words], 2)
    assert stopped.returncode == 0, "a clean stop is no failure"
    assert not (run_dir / "DONE").exists()
    last = succeed("mcore_rl.programs.rl", words, 2)
    assert f"resumed from {run_dir}/checkpoints/iter_" in last.stdout
    assert f"reference policy: {run_dir}/reference/step_" in last.stdout
    assert computed(run_dir) == wanted
    assert over_optimised(last.stdout) == over_optimised(output), "the start before is an earlier attempt's"

    evaluated = succeed("mcore_rl.cli.evaluate", [rl_file, *LENGTH_ALONE, "mesh.tp=1", "mesh.ep=1"])
    result = json.loads(evaluated.stdout.splitlines()[-1])
    assert result["eval/reward"] == pytest.approx(wanted[16]["eval/reward"], abs=1e-6)


@pytest.mark.full
def test_low_rank_adapters_killed_are_bit_equal_in_the_end_and_evaluated(rl_file: Path, tmp_path: Path) -> None:
    """Under replayed routes, with the policy without its adapters as the reference, which is refreshed once."""
    lora = ("lora.rank=8", "optim.lr=5e-3", "model.moe.balance=none", "replay.kind=r2", "train.steps=12")
    straight = succeed("mcore_rl.programs.rl", [rl_file, *lora, "checkpoint.interval=none"], 2)
    assert "adapters: 4 matrices of attention with " in straight.stdout
    wanted = computed(tmp_path / "rl")
    assert wanted[2]["policy/kl_reference_nats"] > 0.0
    words = [rl_file, *lora, f"run_dir={tmp_path / 'broken'}"]
    killed = run_main("tests.e2e.signalled", ["rl", "SIGKILL.update.10", *words], 2)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    succeed("mcore_rl.programs.rl", words, 2)
    assert computed(tmp_path / "broken") == wanted

    evaluated = succeed("mcore_rl.cli.evaluate", [rl_file, *lora, "mesh.tp=1", "mesh.ep=1"])
    result = json.loads(evaluated.stdout.splitlines()[-1])
    assert result["eval/reward"] == pytest.approx(wanted[12]["eval/reward"], abs=1e-6)
    # A config without adapters takes those of the checkpoint, with its rank and scale.
    without = [rl_file, *lora[1:], "mesh.tp=1", "mesh.ep=1"]
    evaluated = succeed("mcore_rl.cli.evaluate", without)
    assert json.loads(evaluated.stdout.splitlines()[-1])["eval/reward"] == result["eval/reward"]
    refused = run_main("mcore_rl.cli.evaluate", [rl_file, *lora, "lora.alpha=8", "mesh.tp=1", "mesh.ep=1"])
    assert refused.returncode != 0 and "lora.alpha is 32.0 there, 8.0 here" in refused.stderr


PPO = (
    "mesh.tp=1 mesh.ep=1 train.steps=8 train.global_batch=8 train.eval_interval=none checkpoint.interval=2 "
    "rl.rollout.prompts_per_step=16 rl.rollout.group_size=1 replay.kind=r2 rl.advantage.kind=gae "
    "rl.loss.kind=ppo rl.loss.kl_in=reward rl.advantage.critic.warmup_rollouts=1 rl.advantage.critic.epochs=2 "
    "rl.advantage.critic.optim.lr=3e-3 rl.loss.kl_target=2.0 rl.loss.kl_horizon=160"
).split()
WITH_PPO = (
    "rl.distill.teacher=self rl.distill.self_refresh_rollouts=2 rl.distill.use=loss "
    "rl.distill.estimator=vocabulary rl.ptx.coeff=0.1 rl.ptx.sequences=2 rl.advantage.critic.replay=r2"
).split()
"""What else keeps state or reads by step, so that one kill tests the resume of all of it."""
OF_PPO = (
    *(*COMPUTED, "ptx/loss_nats", "teacher/kl_nats", "critic/routes_changed_fraction", "critic/loss"),
    *("critic/grad_norm", "values/mean", "values/explained_variance", "kl/coeff"),
)


def reward_model(folder: Path) -> Path:
    """A reward model of two steps, which prefers answers of one letter."""
    lines = [
        '{"prompt": "12=", "chosen": "a", "rejected": "abcd"}\n',
        '{"prompt": "7=", "chosen": "b", "rejected": "bc"}\n',
    ]
    (folder / "pairs.jsonl").write_text("".join(lines * 20))
    path = folder / "rm.toml"
    path.write_text(RL_CONFIG.format(folder=folder).partition("[train]")[0])
    words = [f"run_dir={folder / 'rm'}", f"data.train=['{folder / 'pairs.jsonl'}']", "data.seq_length=64"]
    words += ["model.head=score", "mesh.tp=1", "mesh.ep=1", "train.steps=2", "train.global_batch=8"]
    succeed("mcore_rl.programs.rm", [path, *words])
    return folder / "rm"


@pytest.mark.full
def test_ppo_killed_is_bit_equal_in_the_end_with_its_critic(rl_file: Path, tmp_path: Path) -> None:
    """The critic warms up for a rollout; its schedule decays over its own steps."""
    (tmp_path / "chats.jsonl").write_text('{"prompt": "12=", "response": "ab", "id": 3}\n' * 40)
    texts = f"rl.ptx.files=['{tmp_path / 'chats.jsonl'}']"
    # Its scores are normalised by the moments of all before, which are part of what is resumed.
    scored = f"rl.reward.parts=['length', 'model:{reward_model(tmp_path)}']"
    ppo = (*PPO, *WITH_PPO, texts, scored, "rl.reward.normalize_models=true")
    straight = succeed("mcore_rl.programs.rl", [rl_file, *ppo])
    assert "critic: layers of the policy, and a new head: all values start at 0" in straight.stdout
    assert straight.stdout.count("the critic warms up: weights are as before") == 2
    assert "chats.jsonl has keys that are not read: id (40);" in straight.stdout
    # Reference and teacher wait in main memory, as the plan has it.
    config = load_config(RlRunConfig, tmp_path / "rl/config.toml")
    waiting = computed(tmp_path / "rl", ("memory/waiting_host_bytes",))[8]["memory/waiting_host_bytes"]
    assert waiting == memory_of_fullest_rank(training_of(config, 1)).host > 0
    wanted = computed(tmp_path / "rl", OF_PPO)
    # The policy is as it was in the first rollout and the critic is not: its second values are no zeros.
    assert "policy/loss" not in wanted[2] and "policy/loss" in wanted[3]
    assert wanted[1]["values/mean"] == 0.0 != wanted[3]["values/mean"]
    # A KL below its target by more than a fifth lowers the coefficient, 16 completions of 160 at a time.
    coeffs = [numbers["kl/coeff"] for _, numbers in sorted(wanted.items()) if "kl/coeff" in numbers]
    assert coeffs == pytest.approx([1e-3, 1e-3, 1e-3 * exp(-0.02), 1e-3 * exp(-0.04)], rel=1e-12)
    run_dir = tmp_path / "broken"
    # Between their phases both models leave their tensors, which changes nothing and is no part of what is resumed.
    words = [rl_file, *ppo, f"run_dir={run_dir}", "rl.advantage.critic.store=host", "rl.update.store=host"]
    # In the second rollout, between the critic's four updates of it, and before the save of both models has its name.
    for phase in ("rollout.30", "critic.2", "save.1"):
        killed = run_main("tests.waiting", ["tests.e2e.signalled", "rl", f"SIGKILL.{phase}", *words])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert [path.name for path in (run_dir / "checkpoints").glob("iter_*")] == ["iter_0000002"], phase
    assert not (run_dir / "DONE").exists()
    last = succeed("tests.waiting", ["mcore_rl.programs.rl", *words])
    assert "resumed from" in last.stdout and "critic: " not in last.stdout
    assert f"teacher: {run_dir}/teacher/step_0000000" in last.stdout
    # The teacher is the policy as it was after the second rollout, where its KL is 0.
    kls = {step: numbers["teacher/kl_nats"] for step, numbers in wanted.items() if "teacher/kl_nats" in numbers}
    assert kls[5] == pytest.approx(0.0, abs=1e-6) and kls[6] > 1e-5
    assert computed(run_dir, OF_PPO) == wanted
    assert_emitted("rl with a critic", run_dir)


AHEAD = (
    "mesh.tp=1 mesh.ep=1 mesh.dp=2 train.eval_interval=8 checkpoint.interval=none rl.loss.kl_coeff=0 "
    "rl.loss.reference_refresh_rollouts=none rl.samples.interval=1 "
    "rl.engine.kind=bench.copied_engine:copied_engine rl.rollout.max_staleness=2 replay.kind=r3 "
    "rl.loss.importance_sampling=truncate replay.split_interval=1"
).split()


@pytest.mark.full
def test_two_replicas_generate_ahead_within_the_bound_and_resume_with_the_same_prompts(
    rl_file: Path, tmp_path: Path
) -> None:
    """Four rollout batches of four prompts and two updates, then four more; routes are those of the sampler."""
    run_dir = tmp_path / "rl"
    for steps in (8, 16):
        (run_dir / "DONE").unlink(missing_ok=True)
        finished = succeed("mcore_rl.programs.rl", [rl_file, *AHEAD, f"train.steps={steps}"], 2)
        # No rollout batch has enough tokens to measure a limit.
        common = torch.load(run_dir / f"checkpoints/iter_{steps:07d}/common.pt", weights_only=False)
        assert common[OWN_ENTRY]["progress"]["disagreement_limits"] == []
    assert "resumed from" in finished.stdout
    assert_emitted("rl ahead", run_dir)
    records = list(read_records(run_dir / "metrics.jsonl"))
    batches = [record for record in records if "rollout/started_prompts" in record]
    assert [record["rl/consumed_prompts"] for record in batches] == list(range(4, 36, 4))
    for rollout, record in enumerate(batches):
        ends = 16 if rollout < 4 else 32
        bound = min((2 + rollout + 1) * 4, ends)
        assert 4 * (rollout + 1) <= record["rollout/started_prompts"] <= bound
        assert 0 <= record["rollout/staleness"] <= record["rollout/staleness_max"] <= 2
        # The same weights: what is left is rounding, of routes too.
        assert record.get("rollout/mismatch_kl_current_nats", 0) < 1e-9
        lines = (run_dir / f"samples/step_{2 * rollout:07d}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        problems = [f"reversing/1234/{4 * rollout + p}" for p in range(4) for _ in range(8)]
        assert [sample["problem"] for sample in samples] == problems
        for sample in samples:
            versions = [version for version, _, _ in sample["versions"]]
            assert versions == sorted(set(versions)) and versions[-1] <= 2 * rollout
            assert versions[0] >= max(2 * (rollout - 2), 8 * (rollout >= 4))


BAD = {
    "no prompts": (["rl.prompts.task=file", "rl.prompts.files=['{folder}/empty.jsonl']"], "holds no prompt"),
    "prompts without answers": (
        [
            "rl.prompts.task=file",
            "rl.prompts.files=['{folder}/unanswered.jsonl']",
            "rl.reward.parts=['numeric']",
            "rl.reward.length_max_tokens=none",
        ],
        "no answer in 'answer', with which the reward compares (other keys: solution)",
    ),
    "prompts too long": (["rl.prompts.smallest=30", "rl.prompts.largest=40"], "rl.prompts.max_tokens=12"),
    "group of one": (["rl.rollout.group_size=1", "train.global_batch=4"], "Set group_size to at least 2"),
    "longer than the context": (["model.max_position=16"], "model.max_position=16"),
    "batch that does not divide": (["train.global_batch=24"], "does not divide the 32 completions"),
    "steps in the middle of a rollout": (["train.steps=25"], "Use 26"),
    "another tokenizer's model": (["model.vocab_size=32"], "has 38 tokens, model.vocab_size is 32"),
    "a reward that is not there": (["rl.reward.parts=['length','nowhere:reward']"], "Start in the folder with nowhere"),
    "GSPO with token mean": (["rl.loss.kind=gspo", "rl.loss.aggregation=token_mean"], "has no such field"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_run_is_refused_with_a_remedy(case: str, rl_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "unanswered.jsonl").write_text('{"prompt": "12=", "solution": "21"}\n')
    words, wanted = BAD[case]
    alone = ["mesh.tp=1", "mesh.ep=1", "rl.loss.reference_refresh_rollouts=none", "rl.loss.kl_coeff=0"]
    finished = run_main("mcore_rl.programs.rl", [rl_file, *alone, *[word.format(folder=tmp_path) for word in words]])
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert wanted in finished.stderr
    assert "Traceback" not in finished.stderr


STARTS = {
    "policy": ("mcore_rl.programs.rl", ["checkpoint.load={folder}/base", "checkpoint.load_optimizer=false"]),
    "critic": (
        "mcore_rl.programs.rl",
        "rl.advantage.critic.load={folder}/base rl.advantage.kind=gae rl.loss.kind=ppo rl.rollout.group_size=8".split(),
    ),
    "evaluation": ("mcore_rl.cli.evaluate", ["checkpoint.load={folder}/base"]),
}


@pytest.mark.full
@pytest.mark.parametrize("start", STARTS)
def test_no_start_takes_the_weights_of_another_model_of_the_same_shapes(
    start: str, rl_file: Path, tmp_path: Path
) -> None:
    run_ranks(write_language_model, 1, load_config(RlRunConfig, rl_file).model, tmp_path / "base")
    module, words = STARTS[start]
    alone = ["mesh.tp=1", "mesh.ep=1", "rl.loss.reference_refresh_rollouts=none", "train.steps=2"]
    arguments = [rl_file, *alone, *[word.format(folder=tmp_path) for word in words]]
    other = ["model.rope.theta=1e6", "model.moe.top_k=3"]
    refused = run_main(module, [*arguments, *other])
    assert refused.returncode == 2, refused.stdout + refused.stderr
    for line in (
        "base/iter_0000000 is of a model that computes something else of these weights:",
        "- model.rope.theta is 10000.0 there, 1000000.0 here",
        "- model.moe.top_k is 2 there, 3 here",
        'accept it with checkpoint.allow_changes=["model.rope.theta", "model.moe.top_k"]',
    ):
        assert line in refused.stderr
    assert "Traceback" not in refused.stderr
    allowed = 'checkpoint.allow_changes=["model.rope.theta", "model.moe.top_k"]'
    succeed(module, [*arguments, *other, allowed])


@pytest.mark.full
def test_generate_does_not_use_a_checkpoint_in_the_model_of_another_run(rl_file: Path, tmp_path: Path) -> None:
    model = load_config(RlRunConfig, rl_file).model
    run_ranks(write_language_model, 1, model, tmp_path / "base")
    config = rl_file.read_text()
    words = ["generate", "--run", tmp_path, "--checkpoint", tmp_path / "base", "--prompt", "ab=", "--tokens", "4"]
    (tmp_path / "config.toml").write_text(config.replace("[model]", "[model]\nnorm_eps = 1e-3"))
    refused = run_main(CLI, words)
    assert refused.returncode == 2 and "- model.norm_eps is 1e-06 there, 0.001 here" in refused.stderr
    assert "allow_changes" not in refused.stderr, "there is no config to say it in"
    (tmp_path / "config.toml").write_text(config)
    assert run_main(CLI, words).returncode == 0


OWN_REWARDS = """
import os, time

def broken(scored):
    raise ValueError("no")

def unnumbered(scored):
    return float("nan")

def out_of_text(scored):
    return [(len(scored.completion) + 1, 1.0)]

def hangs_and_crashes_once(scored):
    with open("calls", "a") as calls:
        calls.write(".")
        call = calls.tell()
    # After the 4 answers of the trial and the 8 of the evaluation before the first step, whose errors are not metrics.
    if call == 24:
        time.sleep(60)
    if call == 25:
        os._exit(3)
    return 0.0
"""


@pytest.mark.full
def test_engine_and_trainer_agree_bit_for_bit_with_batch_invariant_products(rl_file: Path, tmp_path: Path) -> None:
    """Completions of other lengths, prompts in parts, several in a packed row, four updates of two rollouts."""
    words = ["mesh.tp=1", "mesh.ep=1", "platform.batch_invariant=true", "rl.rollout.temperature=0.9"]
    words += ["train.steps=4", "train.eval_interval=none", "rl.engine.step_tokens=24", "rl.engine.slots=5"]
    words += ["rl.rollout.prompts_per_step=2", "train.global_batch=8"]
    succeed("mcore_rl.programs.rl", [rl_file, *words, "replay.observe_rollout=true"])
    records = list(read_records(tmp_path / "rl/metrics.jsonl"))
    measured = [record for record in records if "rollout/mismatch_max" in record]
    assert len(measured) == 4
    for record in measured:
        assert record["rollout/mismatch_max"] == record["rollout/mismatch_kl_nats"] == 0.0
    routed = [record for record in records if "rollout_routes/changed_fraction" in record]
    assert routed and all(record["rollout_routes/changed_fraction"] == 0.0 for record in routed)


def test_a_reward_that_fails_is_counted_and_the_run_goes_on(
    rl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run also replays routes, corrects for the engine and evaluates, so that it emits every metric of RL."""
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    names = ("broken", "unnumbered", "out_of_text", "hangs_and_crashes_once")
    parts = f"rl.reward.parts={['length', *(f'own_rewards:{name}' for name in names)]}"
    words = (
        "mesh.tp=1 mesh.ep=1 train.steps=4 train.eval_interval=2 rl.reward.timeout_s=3 rl.reward.error_value=0.0 "
        "rl.reward.max_failed_fraction=1.0 replay.kind=r2 replay.observe_rollout=true replay.split_interval=1 "
        "replay.split_layers=2 rl.loss.importance_sampling=mask rl.loss.router_shift=true rl.eval.samples=2 "
        "rl.eval.temperature=1.0"
    ).split()
    monkeypatch.chdir(tmp_path)
    finished = succeed("mcore_rl.programs.rl", [rl_file, *words, parts])
    assert_emitted("rl", tmp_path / "rl")
    records = list(read_records(tmp_path / "rl/metrics.jsonl"))
    last = [record for record in records if "reward/errors" in record][-1]
    assert last["reward/errors_raised"] == last["reward/errors_not_finite"] == 32
    # The model has 48 ids, the tokenizer 38: the engine and the trainer leave out the same ones.
    assert all(record.get("rollout/mismatch_max", 0.0) < 1e-5 for record in records)
    # The first failure of each kind, not each of hundreds: on the console and in the run folder, with its sample.
    failures = [json.loads(line) for line in (tmp_path / "rl/reward_failures.jsonl").read_text().splitlines()]
    kinds = {(one["part"].partition(":")[2], one["kind"]) for one in failures}
    assert (
        len(failures) == len(kinds)
        and {("broken", "raised"), ("unnumbered", "not_finite"), ("out_of_text", "bad_steps")} <= kinds
    )
    assert finished.stdout.count('raise ValueError("no")') == 1 and "completion: " in finished.stdout


def test_a_reward_that_always_raises_is_refused_before_the_model_is_built(
    rl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "misspelt_reward.py").write_text("def score(record):\n    return len(record.completoin)\n")
    monkeypatch.chdir(tmp_path)
    words = ["mesh.tp=1", "mesh.ep=1", "rl.reward.parts=['length','misspelt_reward:score']"]
    finished = run_main("mcore_rl.programs.rl", [rl_file, *words])
    assert finished.returncode == 2, finished.stdout
    assert "has no attribute 'completoin'" in finished.stderr and "return len(record.completoin)" in finished.stderr
    assert "failed for 4 of 4 completions of a trial on reference answers" in finished.stderr
    assert not (tmp_path / "rl").exists()


@pytest.mark.full
def test_completions_without_a_score_leave_group_and_loss_and_a_batch_of_them_ends_the_run(
    rl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flaky_reward.py").write_text(
        "def score(record):\n"
        "    with open('calls', 'a') as calls:\n"
        "        calls.write('.')\n"
        "        call = calls.tell()\n"
        "    if call % 4 == 0 or call > 4 + 32:\n"
        "        raise ConnectionError('the service is gone')\n"
        "    return call % 3\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["mesh.tp=1", "mesh.ep=1", "rl.reward.parts=['flaky_reward:score']", "train.steps=4"]
    words += ["train.eval_interval=none", "rl.reward.length_max_tokens=none", "rl.samples.interval=1"]
    finished = run_main("mcore_rl.programs.rl", [rl_file, *words])
    assert finished.returncode == 2, finished.stdout
    assert "failed for 32 of 32 completions of this batch" in finished.stderr
    assert finished.stderr.count("ConnectionError: the service is gone") and "Traceback" in finished.stdout
    samples = [json.loads(x) for x in (tmp_path / "rl/samples/step_0000000.jsonl").read_text().splitlines()]
    assert sum(sample["reward"] is None for sample in samples) == 8
    first = next(record for record in read_records(tmp_path / "rl/metrics.jsonl") if "reward/mean" in record)
    assert first["reward/unscored_completions"] == 8
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    assert first["reward/mean"] == pytest.approx(sum(rewards) / 24)


@pytest.mark.full
def test_a_reward_of_steps_is_learned_from_and_bad_steps_are_counted(
    rl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_steps.py").write_text(
        "def digits(scored):\n"
        "    return [(end, float(c.isdigit())) for end, c in enumerate(scored.completion, 1)]\n\n\n"
        "def late(scored):\n    return [(len(scored.completion) + 1, 1.0)]\n"
    )
    monkeypatch.chdir(tmp_path)
    parts = "rl.reward.parts=['own_steps:digits','own_steps:late']"
    words = ["mesh.tp=1", "mesh.dp=2", "train.steps=4", "train.eval_interval=none", "rl.advantage.kind=steps"]
    words += ["rl.reward.error_value=0.0", "rl.reward.max_failed_fraction=1"]
    words += [parts, "rl.samples.interval=1", "rl.reward.length_max_tokens=none"]
    succeed("mcore_rl.programs.rl", [rl_file, *words], 2)
    records = list(read_records(tmp_path / "rl/metrics.jsonl"))
    last = [record for record in records if "reward/errors" in record][-1]
    assert last["reward/errors_bad_steps"] == last["reward/errors"] == 32
    assert all(record["train/grad_norm"] > 0.0 for record in records if "train/grad_norm" in record)
    for path in (tmp_path / "rl/samples").iterdir():
        for sample in map(json.loads, path.read_text().splitlines()):
            assert sample["reward"] == sum(c.isdigit() for c in sample["completion"])


@pytest.mark.full
def test_r2_with_a_capacity_warns_and_logs_the_tokens_that_updates_drop(rl_file: Path, tmp_path: Path) -> None:
    alone = ["mesh.tp=1", "mesh.ep=1", "train.steps=2", "train.eval_interval=2", "checkpoint.interval=2"]
    finished = succeed(
        "mcore_rl.programs.rl",
        [rl_file, *alone, "replay.kind=r2", "model.moe.capacity_factor=1.0", "rl.advantage.kind=remax"],
    )
    assert_emitted("rl with remax", tmp_path / "rl")
    assert "warning: model.moe.capacity_factor=1.0" in finished.stdout
    records = list(read_records(tmp_path / "rl/metrics.jsonl"))
    (last,) = [record for record in records if "moe/dropped_tokens" in record]
    assert last["moe/dropped_tokens"] > 0 and 0 < last["moe/dropped_fraction"] < 0.5


@pytest.mark.full
def test_the_report_of_a_finished_run_has_no_evaluation_and_no_start_that_never_wrote(
    rl_file: Path, config_file: Path, trained: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "finished", symlinks=True)
    assert not (run / "logs/0" / NOT_WRITER).exists()
    evaluated = run_main(CLI, ["eval", rl_file, f"run_dir={run}"])
    assert evaluated.returncode == 2 and "model.vocab_size" in evaluated.stderr, evaluated.stderr
    other = run_main(CLI, ["pretrain", config_file, f"run_dir={run}", "data.seq_length=16"])
    assert other.returncode == 2 and "has a finished run with other settings" in other.stderr
    assert all((run / f"logs/{number}/failure.json").exists() for number in (1, 2))
    assert [notice for notice in notices(read_run(run, "run")) if notice.level == "error"] == []
    # An attempt that wrote and failed is the run's: its step of 16 tokens is refused after the claim.
    (run / "DONE").unlink()
    third = run_main(CLI, ["pretrain", config_file, f"run_dir={run}", "data.seq_length=16"])
    assert third.returncode == 2, third.stderr
    (error,) = [notice for notice in notices(read_run(run, "run")) if notice.level == "error"]
    assert error.text.startswith("attempt 3: ") and "data.seq_length" in error.detail


def test_a_run_that_finds_nothing_to_learn_from_goes_on_and_says_so(rl_file: Path, tmp_path: Path) -> None:
    """Every completion is worth the same to a pattern that none has: dynamic sampling is left without a group."""
    parts = ["rl.reward.parts=['regex']", "rl.reward.regex_pattern=nothing", "rl.reward.length_max_tokens=none"]
    words = ["mesh.tp=1", "mesh.ep=1", "train.steps=4", "rl.rollout.dynamic_sampling=true", *parts]
    words += ["rl.rollout.top_p=0.9"]
    finished = succeed("mcore_rl.programs.rl", [rl_file, *words, "rl.rollout.max_refills=1"])
    assert finished.stdout.count("nothing to train on in this update") == 4
    assert "warning: rl.rollout.top_p=0.9: tokens are sampled from" in finished.stdout
    records = list(read_records(tmp_path / "rl/metrics.jsonl"))
    name = "reward/groups_without_signal_fraction"
    assert {record[name] for record in records if name in record} == {1.0}
    assert_emitted("rl with dynamic sampling", tmp_path / "rl")
    assert (tmp_path / "rl/DONE").exists()


@pytest.mark.full
def test_a_run_that_the_balance_loss_alone_moves_warns_in_log_and_report(rl_file: Path, tmp_path: Path) -> None:
    """All rewards are 0; without a KL the experts' balance loss is all that has a gradient."""
    words = ["mesh.tp=1", "mesh.ep=1", "train.steps=11", "train.global_batch=32", "rl.loss.kl_coeff=0.0"]
    words += ["rl.reward.parts=['regex']", "rl.reward.regex_pattern=nothing", "checkpoint.interval=none"]
    words += ["rl.reward.length_max_tokens=none", "rl.loss.reference_refresh_rollouts=none"]
    finished = succeed("mcore_rl.programs.rl", [rl_file, *words])
    records = list(read_records(tmp_path / "rl/metrics.jsonl"))
    assert all(record["train/grad_norm"] > 0 for record in records if "train/grad_norm" in record)
    assert finished.stdout.count("| no signal in 4 of 4 groups |") == 11
    found = [notice.text for notice in notices(read_run(tmp_path / "rl", "rl"))]
    for begin in (
        "all 32 scores of a rollout batch are 0: nothing is learned from them. Likely reason: 0 % of the completions",
        "100 % of the groups of the last 5 rollout batches have no signal",
        "no token of an update has an advantage: the routers' balance or z-loss alone moves the weights",
        "no difference shown: eval/accuracy 0 -> 0, difference +0 (95 %: -0.4899 to +0.4899; 4 held-out prompts)",
    ):
        assert finished.stdout.count(f"warning: {begin}") == 1, finished.stdout
        assert sum(text.startswith(begin) for text in found) == 1, found
    # The last line of the log and the report's table have the same verdict.
    table = dict(numbers([read_run(tmp_path / "rl", "rl")]))
    assert finished.stdout.splitlines()[-1].startswith(f"warning: {table['verdict'][0]}. Likely reason: ")
