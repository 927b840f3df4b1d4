"""A reward model and preference optimisation as a user runs them: from a language model, killed and resumed; scores are
shifted, evaluated, refused, and the reference's logprobs cached or gone.
"""

import io
import json
import os
import random
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from mcore_rl.cli import evaluate
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.preferences import DPOConfig, DPOSection, PreferenceDataConfig, RewardModelConfig
from mcore_rl.config.run import CheckpointConfig, PlatformConfig, TrainConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh, seed_ranks
from mcore_rl.metrics.jsonl import read_records
from mcore_rl.model.build import build_model
from mcore_rl.programs import dpo, rm
from mcore_rl.programs.rl import teacher_source
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.frozen_model import FrozenModel
from mcore_rl.rl.rewards.from_model import RewardModels, load_reward_models
from mcore_rl.storage.checkpoint import SCORE_SHIFT, SCORE_WEIGHT, find_checkpoint
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from mcore_rl.train.preferences import PreferenceTrainer
from mcore_rl.train.reward_model import RewardModelTrainer
from tests.conversion import assert_adapters_alone_moved, exported, imported, read_dist
from tests.emitted import assert_emitted
from tests.ranks import run_ranks
from tests.rounding import fp32_rounding
from tests.tiny_models import TINY
from tests.tokenizer_files import save_tokenizer
from tests.unit.rl import test_reward_model

WORDS = [f"w{index}" for index in range(100)]
MODEL = TINY["qwen3_moe"].model_copy(update={"num_layers": 2, "hidden_dropout": 0.1})
WITHOUT_DROPOUT = MODEL.model_copy(update={"hidden_dropout": 0.0})
"""A policy that is its reference exactly, at the start."""
MESH = MeshConfig(tp=2, ep=2)
STEPS, KILLED_AT = 12, 7
DPO_STEPS, DPO_KILLED_AT = 8, 6


def write_inputs(folder: Path, model: ModelConfig, sizes: dict[str, int], most_words: int) -> Path:
    """Write a tokenizer of words, a model, and questions whose better answer repeats their last word; the other answer
    has one to `most_words` words.
    """
    save_tokenizer(folder, ["<unk>", "<end>", *WORDS], "<unk>", ("<end>",), eos_token="<end>")
    draw = random.Random(0)
    for name, count in sizes.items():
        lines = []
        for _ in range(count):
            right, wrong = draw.sample(WORDS[:6], 2)
            question = " ".join([*draw.choices(WORDS, k=draw.randint(0, 5)), right])
            rejected = " ".join([wrong] * (draw.randint(1, most_words) if most_words > 1 else 1))
            lines.append(json.dumps({"prompt": question, "chosen": right, "rejected": rejected}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    run_ranks(write_language_model, 1, model, folder / "base")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("pairs"), MODEL, {"train": 200, "valid": 30}, most_words=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("dpo"), WITHOUT_DROPOUT, {"train": 60, "valid": 20}, most_words=1)


def write_language_model(model: ModelConfig, path: Path) -> None:
    """On a rank: a checkpoint with random weights."""
    settings = PlatformConfig(layers="torch")
    platform, mesh = platforms.start(settings), build_mesh(MeshConfig())
    seed_ranks(0)
    save_weights(build_model(model, mesh, platform, settings), mesh, model, path)


def config_of(folder: Path, name: str) -> RewardModelConfig:
    return RewardModelConfig(
        run_dir=str(folder / name),
        platform=PlatformConfig(layers="torch", deterministic=True),
        model=MODEL.scored,
        mesh=MESH,
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        train=TrainConfig(steps=STEPS, global_batch=16, eval_interval=6),
        checkpoint=CheckpointConfig(load=str(folder / "base"), load_optimizer=False, interval=5),
        data=data_of(folder),
    )


def data_of(folder: Path) -> PreferenceDataConfig:
    return PreferenceDataConfig(
        train=(str(folder / "train.jsonl"),),
        valid=(str(folder / "valid.jsonl"),),
        chat_template="raw",
        seq_length=16,
        tokens_per_microbatch=128,
        tokenizer={"kind": "huggingface", "path": str(folder)},  # type: ignore[arg-type]
    )


def killed_at(step: int, config: RewardModelConfig | DPOConfig) -> None:
    """On a rank: the run, which is killed when it begins the step after `step`."""
    is_dpo = isinstance(config, DPOConfig)
    owner, train = (PreferenceTrainer, dpo.train) if is_dpo else (RewardModelTrainer, rm.train)
    whole = owner._step

    def step_or_end(trainer: Any) -> None:
        if trainer.state.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(trainer)

    with mock.patch.object(owner, "_step", step_or_end):
        train(config)


def numbers_of(run_dir: Path) -> dict[tuple[int, str], Any]:
    """Everything measured on pairs, by step and name."""
    return {
        (record["step"], name): value
        for record in read_records(run_dir / "metrics.jsonl")
        for name, value in record.items()
        if "pairs/" in name or name == "train/grad_norm"
    }


def evaluated(config: RewardModelConfig) -> str:
    with redirect_stdout(io.StringIO()) as output:
        evaluate.evaluate_reward_model(config)
    return output.getvalue()


def loaded_as_policy(path: Path) -> None:
    settings = PlatformConfig(layers="torch")
    platform, mesh = platforms.start(settings), build_mesh(MESH)
    seed_ranks(0)
    try:
        load_weights(build_model(MODEL, mesh, platform, settings), mesh, MODEL, path)
    finally:
        destroy_mesh()


def scores_of(paths: list[Path], tokenizer: TokenizerConfig) -> list[Tensor]:
    """On a rank: the scores that reward models give the same completions as parts of a reward."""
    platform, mesh, found = platforms.start(PlatformConfig(layers="torch")), build_mesh(MESH), []
    seed_ranks(0)

    def models_of(path: Path, platform: platforms.Platform) -> RewardModels:
        config = test_reward_model.config_of(path).model_copy(update={"mesh": MESH})
        models = load_reward_models(config, load_tokenizer(tokenizer), mesh, platform)
        assert models is not None
        return models

    for path in paths:
        outcomes = models_of(path, platform).outcomes(test_reward_model.groups(), are_counted=False)
        found.append(test_reward_model.values(outcomes[f"model:{path}"]))
    refused = r'layers="te".* Or name its weights .* `mcore-rl convert export --merge`'
    with pytest.raises(ConfigError, match=refused):
        models_of(paths[0], replace(platform, layers="te"))
    return found


@pytest.mark.full
def test_a_reward_model_of_adapters_keeps_its_base_and_scores_as_its_merged_weights(folder: Path) -> None:
    config = config_of(folder, "adapters")
    model = config.model.model_copy(update={"hidden_dropout": 0.0})
    train = TrainConfig(steps=6, global_batch=16)
    config = config.model_copy(update={"lora": LoraConfig(rank=4), "model": model, "train": train})
    run_ranks(rm.train, 2, config)
    end = find_checkpoint(folder / "adapters")
    assert_adapters_alone_moved(find_checkpoint(folder / "base"), end, SCORE_WEIGHT, SCORE_SHIFT)
    exported(end, folder / "merged", merges=True)
    merged = imported(folder / "merged", folder / "imported", vocab_multiple=MODEL.vocab_multiple)
    ours, theirs = run_ranks(scores_of, 2, [end, merged], config.data.tokenizer)[0]
    # An export subtracts nothing from scores.
    shift = read_dist(end)[SCORE_SHIFT].double()
    atol = fp32_rounding(theirs.abs().max().item(), config.model.hidden_size)
    torch.testing.assert_close(ours + shift, theirs, rtol=0, atol=atol)
    assert ours.std() > 0.1


@pytest.mark.full
def test_a_process_reward_model_learns_from_labels_of_steps(folder: Path) -> None:
    """A step is right when its word is one of three; the steps of an answer are of one or two words."""
    draw = random.Random(1)
    for name, count in (("steps_train", 240), ("steps_valid", 40)):
        lines = []
        for _ in range(count):
            words = draw.choices(WORDS[:6], k=draw.randint(1, 4))
            steps = [" ".join([*draw.choices(WORDS, k=draw.randint(0, 1)), word]) for word in words]
            labels = [word in WORDS[:3] for word in words]
            lines.append(json.dumps({"prompt": draw.choice(WORDS), "completions": steps, "labels": labels}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    config = config_of(folder, "steps")
    data = config.data.model_copy(
        update={
            "train": (str(folder / "steps_train.jsonl"),),
            "valid": (str(folder / "steps_valid.jsonl"),),
            "format": "steps",
        }
    )
    config = config.model_copy(update={"data": data})
    run_ranks(rm.train, 2, config)
    assert_emitted("rm of steps", folder / "steps")
    records = [one for one in read_records(folder / "steps/metrics.jsonl") if "event" not in one]
    wanted = {name: value for one in records for name, value in one.items() if name.startswith("eval/steps/")}
    assert next(one["steps/loss"] for one in records if "steps/loss" in one) == pytest.approx(0.6931471805599453)
    assert wanted["eval/steps/accuracy"] > 0.9 > 0.6 > wanted["eval/steps/right_fraction"]
    # On another mesh, from the checkpoint; nothing was shifted.
    result = json.loads(run_ranks(evaluated, 1, config.model_copy(update={"mesh": MeshConfig()}))[0])
    assert result["steps"] == sum(
        len(json.loads(line)["labels"]) for line in (folder / "steps_valid.jsonl").read_text().splitlines()
    )
    for name, value in wanted.items():
        assert result[name.removeprefix("eval/")] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.full
def test_a_reward_model_that_is_killed_resumes_bit_equal_and_scores_chosen_answers_0(folder: Path) -> None:
    straight, killed = config_of(folder, "straight"), config_of(folder, "killed")
    run_ranks(rm.train, 2, straight)
    with pytest.raises(AssertionError, match="died without an answer"):
        run_ranks(killed_at, 2, KILLED_AT, killed)
    assert not (folder / "killed/DONE").exists()
    run_ranks(rm.train, 2, killed)
    wanted = numbers_of(folder / "straight")
    assert numbers_of(folder / "killed") == wanted
    assert_emitted("rm", folder / "straight")

    assert wanted[1, "pairs/loss"] == pytest.approx(0.6931471805599453), "all scores begin at 0"
    assert wanted[STEPS, "eval/pairs/loss"] < 0.9 * wanted[1, "pairs/loss"]
    # Unshifted before, and after the last step 0 for the chosen answers of the evaluation.
    assert abs(wanted[6, "eval/pairs/chosen_reward"]) > 1e-3
    assert wanted[STEPS, "eval/pairs/chosen_reward"] == pytest.approx(0.0, abs=1e-6)

    # On another mesh, from the checkpoint.
    result = json.loads(run_ranks(evaluated, 1, straight.model_copy(update={"mesh": MeshConfig()}))[0])
    assert (result["pairs"], sum(row["pairs"] for row in result["calibration"])) == (30, 30)
    for name in ("loss", "accuracy", "reward_mean", "calibration_error", "length_correlation"):
        found = wanted[STEPS, f"eval/pairs/{name}"]
        assert result[f"pairs/{name}"] == pytest.approx(found, rel=1e-4, abs=1e-5), name

    with pytest.raises(AssertionError, match="is of a reward model or a critic, whose scores are no logits"):
        run_ranks(loaded_as_policy, 2, folder / "straight")


def dpo_config(home: Path, name: str, lora: LoraConfig | None = None) -> DPOConfig:
    return DPOConfig(
        lora=lora or LoraConfig(),
        run_dir=str(home / name),
        platform=PlatformConfig(layers="torch", deterministic=True),
        model=WITHOUT_DROPOUT,
        mesh=MeshConfig(),
        optim=OptimConfig(lr=3e-3 if lora is None else 1e-2, warmup_steps=2),
        train=TrainConfig(steps=DPO_STEPS, global_batch=16, eval_interval=4),
        checkpoint=CheckpointConfig(load=str(home / "base"), load_optimizer=False, interval=5),
        data=data_of(home),
        dpo=DPOSection(beta=0.5),
    )


def refusal(config: DPOConfig) -> str:
    with pytest.raises(CheckpointError) as error:
        dpo.train(config)
    return str(error.value)


@pytest.mark.full
def test_a_reference_of_another_model_is_refused(home: Path) -> None:
    config = dpo_config(home, "other")
    config = config.model_copy(
        update={
            "model": WITHOUT_DROPOUT.model_copy(update={"norm_eps": 1e-3}),
            "checkpoint": CheckpointConfig(),
            "dpo": DPOSection(beta=0.5, reference=str(home / "base")),
        }
    )
    assert "- model.norm_eps is 1e-06 there, 0.001 here" in run_ranks(refusal, 1, config)[0]


def logits_of_teachers(config: DPOConfig, paths: list[Path]) -> list[Tensor]:
    """On a rank: logits of teachers of a policy with the config's model."""
    platform, mesh, found = platforms.start(config.platform), build_mesh(config.mesh), []
    seed_ranks(0)
    tokens = torch.arange(16)[None]
    for path in paths:
        source = teacher_source(str(path), WITHOUT_DROPOUT, config.mesh, 16, 16, load_tokenizer(config.data.tokenizer))
        teacher = FrozenModel(
            source.model, source.path, mesh, platform, config.platform, store="host", verify_checksums=True
        )
        with torch.no_grad(), teacher.installed(), evaluating(teacher.chunks):
            found.append(teacher.chunks[0](tokens, tokens, None)[..., : WITHOUT_DROPOUT.vocab_size].clone())
    return found


def cached(run_dir: Path) -> dict[str, list[float]]:
    files = sorted((run_dir / "reference_logprobs").glob("*.npz"))
    return {file.name: numpy.load(file)["logprobs"].tolist() for file in files}


@pytest.mark.full
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)], ids=["whole", "adapters"])
def test_a_killed_run_without_its_cache_resumes_bit_equal_from_a_fresh_pass_of_the_reference(
    lora: LoraConfig | None, home: Path
) -> None:
    """The reference of new adapters is the model without them."""
    kind = "whole" if lora is None else "adapters"
    straight, killed = (dpo_config(home, f"{kind}-{name}", lora) for name in ("straight", "killed"))
    straight_dir, killed_dir = home / f"{kind}-straight", home / f"{kind}-killed"
    run_ranks(dpo.train, 1, straight)
    with pytest.raises(AssertionError, match="died without an answer"):
        run_ranks(killed_at, 1, DPO_KILLED_AT, killed)
    before = cached(killed_dir)
    # Pairs of train and valid; other weights are in the modules when the run resumes.
    assert [len(logprobs) for logprobs in before.values()].count(120) == 1 and len(before) == 2
    first, second = sorted((killed_dir / "reference_logprobs").glob("*.npz"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-40])
    run_ranks(dpo.train, 1, killed)
    assert cached(killed_dir) == cached(straight_dir) == before
    wanted = numbers_of(straight_dir)
    assert numbers_of(killed_dir) == wanted
    events = (killed_dir / "metrics.jsonl").read_text()
    assert "is damaged" in events and "logprobs of 40 answers took" in events
    assert_emitted("dpo", straight_dir)

    assert wanted[1, "pairs/loss"] == pytest.approx(numpy.log(2), rel=1e-12), "the model is its reference"
    assert wanted[1, "pairs/accuracy"] == 0.5 and wanted[1, "pairs/reward_margin"] == 0
    if lora is None:
        assert wanted[DPO_STEPS, "pairs/loss"] < 0.6 and wanted[DPO_STEPS, "eval/pairs/accuracy"] > 0.6
        return
    # Over random weights, which eight steps of all of them teach more.
    assert wanted[DPO_STEPS, "pairs/loss"] < 0.68
    end = find_checkpoint(straight_dir)
    assert_adapters_alone_moved(find_checkpoint(home / "base"), end)
    exported(end, home / "merged", merges=True)
    merged = imported(home / "merged", home / "imported", vocab_multiple=WITHOUT_DROPOUT.vocab_multiple)
    ((ours, theirs, of_base),) = run_ranks(logits_of_teachers, 1, straight, [end, merged, home / "base"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert (ours - of_base).abs().max() > 0.01
    others = LoraConfig(rank=8, alpha=8.0)
    asked = straight.model_copy(
        update={"lora": others, "run_dir": str(home / "asked"), "dpo": DPOSection(beta=0.5, reference=str(end))}
    )
    assert "- lora.alpha is 32.0 there, 8.0 here" in run_ranks(refusal, 1, asked)[0]
