"""Training of a part of the model: what is frozen stays, and the rest is saved and resumed bit for bit."""

import logging
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import ConfigError, TrainingError
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import unwrap
from mcore_rl.programs.open_run import open_run
from mcore_rl.train import setup
from mcore_rl.train.loop import SupervisedTrainer
from mcore_rl.train.step import NextTokenHead
from tests.parallel.checkpointing import SMALL, SMALL_DEEPSEEK, config_of, opened
from tests.ranks import run_ranks

PARTS = {"all": "", "experts": ".experts.", "attention": ".self_attention."}
CELLS = {"tp2-etp2": (SMALL, MeshConfig(tp=2, etp=2)), "frozen-stage": (SMALL_DEEPSEEK, MeshConfig(pp=2))}


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_trains_and_resumes_bit_for_bit(part: str, cell: str, tmp_path: Path) -> None:
    whole, broken = (config_of(tmp_path / name, *CELLS[cell]) for name in ("whole", "broken"))
    through = run_ranks(trained_part, 2, whole, part, cell, 4, ())
    saved = run_ranks(trained_part, 2, broken, part, cell, 2, (2,))
    assert [rank["warnings"] for rank in saved] == [[], []]
    resumed = run_ranks(trained_part, 2, broken, part, cell, 4, ())
    for expected, found in zip(through, resumed, strict=True):
        assert {step: expected["losses"][step] for step in (3, 4)} == found["losses"]
        assert all(torch.equal(expected["weights"][key], found["weights"][key]) for key in expected["weights"])
        assert all(torch.equal(*pair) for pair in zip(expected["moments"], found["moments"], strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    "recompute", [{"recompute": "full"}, {"recompute": "selective", "recompute_modules": ("moe",)}], ids=["full", "moe"]
)
def test_recomputed_layers_learn_over_a_frozen_embedding(recompute: dict[str, Any], tmp_path: Path) -> None:
    """As without recomputation: every layer has its gradient."""
    kept, again = (config_of(tmp_path / name, SMALL, MeshConfig()) for name in ("kept", "again"))
    again = again.model_copy(update={"platform": again.platform.model_copy(update=recompute)})
    (expected,), (found,) = (run_ranks(trained_part, 1, config, "experts", "1", 2, ()) for config in (kept, again))
    assert expected["losses"] == found["losses"]
    assert all(torch.equal(expected["weights"][key], found["weights"][key]) for key in expected["weights"])


@pytest.mark.full
def test_a_loss_without_any_gradient_ends_the_run(tmp_path: Path) -> None:
    """As where the layers are detached from the loss, and the rest is frozen."""
    (message,) = run_ranks(detached_run, 1, config_of(tmp_path, SMALL, MeshConfig()))
    assert message.startswith("step 1 has a loss of 4.")
    assert "a gradient of exactly 0: nothing is trained. Most likely no parameter" in message


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(pp=2)], ids=["one-rank", "pp2"])
def test_a_layer_that_is_frozen_alone_is_refused_at_the_start(mesh: MeshConfig, tmp_path: Path) -> None:
    """Its checkpoint has one tensor for all layers: without the refusal the first save fails."""
    messages = run_ranks(partly_frozen_run, mesh.pp, config_of(tmp_path, SMALL, mesh))
    for message in messages:
        assert message.startswith("decoder.layers.mlp.router.weight is one tensor in a checkpoint")
        assert "Freeze it in all layers" in message


def partly_frozen_run(config: PretrainConfig) -> str:
    setup.freeze = freeze_first_router
    with pytest.raises(ConfigError) as error, open_run(config, start(config.platform)):
        pass
    return str(error.value)


def freeze_first_router(chunks: Sequence[nn.Module], **_settings: bool) -> None:
    if chunks[0].pre_process:
        unwrap(chunks[0]).decoder.layers[0].mlp.router.requires_grad_(False)


def detached_run(config: PretrainConfig) -> str:
    setup.freeze = partial(freeze_all_but, PARTS["experts"], "1")
    tokens = torch.arange(16)
    sample = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(16), "position_ids": tokens}
    with open_run(config, start(config.platform)) as run:
        unwrap(run.state.chunks[0]).decoder.register_forward_hook(lambda *call: call[-1].detach())
        trainer = SupervisedTrainer(run, NextTokenHead(), train=[sample] * 160, seq_length=16)
        with pytest.raises(TrainingError) as error:
            trainer.run()
    return str(error.value)


def trained_part(config: PretrainConfig, part: str, cell: str, until: int, save_at: Collection[int]) -> dict[str, Any]:
    """On a rank: a run that trains one part of the model; of "frozen-stage", on the last stage alone."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron").addHandler(handler)
    setup.freeze = partial(freeze_all_but, PARTS[part], cell)
    with opened(config) as run:
        before = weights_of(run.state.chunks)
        run.train(until, save_at)
        after = weights_of(run.state.chunks)
        is_trained_stage = cell != "frozen-stage" or run.state.mesh.is_last_stage
        for name, weight in after.items():
            has_moved = not torch.equal(weight, before[name])
            assert has_moved == (is_trained_stage and PARTS[part] in name), name
        return {
            "losses": run.losses,
            "weights": after,
            "moments": [
                tensor
                for inner in run.state.optimizer.chained_optimizers
                for moments in inner.optimizer.state.values()
                for tensor in moments.values()
            ],
            "warnings": [line for line in warnings if "common state dict" in line],
        }


def freeze_all_but(part: str, cell: str, chunks: Sequence[nn.Module], **_settings: bool) -> None:
    is_first_stage = any("word_embeddings" in name for name, _ in chunks[0].named_parameters())
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            param.requires_grad_(part in name and not (cell == "frozen-stage" and is_first_stage))


def weights_of(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for chunk in chunks for name, param in chunk.named_parameters()}
