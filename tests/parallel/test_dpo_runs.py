"""Preference optimisation as a user runs it: killed and resumed, with the reference's logprobs cached or gone."""

import json
import os
import random
import signal
from pathlib import Path
from unittest import mock

import numpy
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.preferences import DPOConfig, DPOSection, PreferenceDataConfig
from mcore_rl.config.run import CheckpointConfig, PlatformConfig, TrainConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.programs import dpo
from mcore_rl.programs.rl import teacher_source
from mcore_rl.rl.batch import evaluating
from mcore_rl.rl.frozen_model import FrozenModel
from mcore_rl.storage.checkpoints.read import find_checkpoint
from mcore_rl.train.preferences import PreferenceTrainer
from tests.conversion import assert_adapters_alone_moved, exported, imported
from tests.emitted import assert_emitted
from tests.parallel.test_reward_model_runs import MODEL as WITH_DROPOUT
from tests.parallel.test_reward_model_runs import WORDS, numbers_of, write_language_model
from tests.ranks import run_ranks

# Without dropout a model is its reference exactly, at the start.
MODEL = WITH_DROPOUT.model_copy(update={"hidden_dropout": 0.0})
STEPS, KILLED_AT = 8, 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words, questions whose better answer repeats their last word, and a model."""
    home = tmp_path_factory.mktemp("dpo")
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<end>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    draw = random.Random(0)
    for name, count in (("train", 60), ("valid", 20)):
        lines = []
        for _ in range(count):
            right, wrong = draw.sample(WORDS[:6], 2)
            question = " ".join([*draw.choices(WORDS, k=draw.randint(0, 5)), right])
            lines.append(json.dumps({"prompt": question, "chosen": right, "rejected": wrong}))
        (home / f"{name}.jsonl").write_text("\n".join(lines))
    run_ranks(write_language_model, 1, MODEL, home / "base")
    return home


def config_of(home: Path, name: str, lora: LoraConfig | None = None) -> DPOConfig:
    return DPOConfig(
        lora=lora or LoraConfig(),
        run_dir=str(home / name),
        platform=PlatformConfig(layers="torch", deterministic=True),
        model=MODEL,
        mesh=MeshConfig(),
        optim=OptimConfig(lr=3e-3 if lora is None else 1e-2, warmup_steps=2),
        train=TrainConfig(steps=STEPS, global_batch=16, eval_interval=4),
        checkpoint=CheckpointConfig(load=str(home / "base"), load_optimizer=False, interval=5),
        data=PreferenceDataConfig(
            train=(str(home / "train.jsonl"),),
            valid=(str(home / "valid.jsonl"),),
            chat_template="raw",
            seq_length=16,
            tokens_per_microbatch=128,
            tokenizer={"kind": "huggingface", "path": str(home)},  # type: ignore[arg-type]
        ),
        dpo=DPOSection(beta=0.5),
    )


def killed_at(step: int, config: DPOConfig) -> None:
    """On a rank: the run, which is killed when it begins the step after `step`."""
    whole = PreferenceTrainer._step

    def step_or_end(trainer: PreferenceTrainer) -> None:
        if trainer.state.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(trainer)

    with mock.patch.object(PreferenceTrainer, "_step", step_or_end):
        dpo.train(config)


def refusal(config: DPOConfig) -> str:
    """On a rank: the message of a run that does not begin."""
    with pytest.raises(CheckpointError) as error:
        dpo.train(config)
    return str(error.value)


def test_a_reference_of_another_model_is_refused(home: Path) -> None:
    config = config_of(home, "other")
    config = config.model_copy(
        update={
            "model": MODEL.model_copy(update={"norm_eps": 1e-3}),
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
        source = teacher_source(str(path), MODEL, config.mesh, 16, 16, load_tokenizer(config.data.tokenizer))
        teacher = FrozenModel(
            source.model, source.path, mesh, platform, config.platform, store="host", verify_checksums=True
        )
        with torch.no_grad(), teacher.installed(), evaluating(teacher.chunks):
            found.append(teacher.chunks[0](tokens, tokens, None)[..., : MODEL.vocab_size].clone())
    return found


def cached(run_dir: Path) -> dict[str, list[float]]:
    """The reference's logprobs by the name of their file."""
    files = sorted((run_dir / "reference_logprobs").glob("*.npz"))
    return {file.name: numpy.load(file)["logprobs"].tolist() for file in files}


@pytest.mark.matrix("whole")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)], ids=["whole", "adapters"])
def test_a_killed_run_without_its_cache_resumes_bit_equal_from_a_fresh_pass_of_the_reference(
    lora: LoraConfig | None, home: Path
) -> None:
    """The reference of new adapters is the model without them."""
    kind = "whole" if lora is None else "adapters"
    straight, killed = (config_of(home, f"{kind}-{name}", lora) for name in ("straight", "killed"))
    straight_dir, killed_dir = home / f"{kind}-straight", home / f"{kind}-killed"
    run_ranks(dpo.train, 1, straight)
    with pytest.raises(AssertionError, match="died without an answer"):
        run_ranks(killed_at, 1, KILLED_AT, killed)
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
        assert wanted[STEPS, "pairs/loss"] < 0.6 and wanted[STEPS, "eval/pairs/accuracy"] > 0.6
        return
    # Over random weights, which eight steps of all of them teach more.
    assert wanted[STEPS, "pairs/loss"] < 0.68
    end = find_checkpoint(straight_dir)
    assert_adapters_alone_moved(find_checkpoint(home / "base"), end)
    exported(end, home / "merged", merges=True)
    merged = imported(home / "merged", home / "imported", vocab_multiple=MODEL.vocab_multiple)
    ((ours, theirs, of_base),) = run_ranks(logits_of_teachers, 1, straight, [end, merged, home / "base"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert (ours - of_base).abs().max() > 0.01
    others = LoraConfig(rank=8, alpha=8.0)
    asked = straight.model_copy(
        update={"lora": others, "run_dir": str(home / "asked"), "dpo": DPOSection(beta=0.5, reference=str(end))}
    )
    assert "- lora.alpha is 32.0 there, 8.0 here" in run_ranks(refusal, 1, asked)[0]
