"""Converted checkpoints: their weights are streamed from any mesh, and what was trained goes back."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert import logits
from mcore_rl.convert.check import LOGITS_BYTES
from mcore_rl.convert.hf.model import open_hf_model
from mcore_rl.planning.weights import weights_by_stage
from tests.conversion import (
    assert_same,
    differing,
    exported,
    imported,
    quiet,
    read_dist,
    read_hf,
    saved,
    with_mtp,
    write_hf,
)
from tests.hf_models import TOLERANCE, oracle
from tests.hf_weights import to_global
from tests.parallel.checkpointing import config_of, trained
from tests.parallel.converted import described, streamed_weights, weight_bytes
from tests.parallel.parity import MESHES
from tests.ranks import run_ranks
from tests.tiny_models import TINY

EVEN: dict[str, Any] = {"num_hidden_layers": 4}
"""So that pipelines can be cut."""
TWO_GROUPS = EVEN | {"num_key_value_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "llama": TWO_GROUPS,
    "qwen3": TWO_GROUPS,
    "qwen3_moe": TWO_GROUPS,
    "mixtral": TWO_GROUPS,
    "deepseek_v3": EVEN,
    "qwen2": TWO_GROUPS,
    "qwen2_moe": TWO_GROUPS,
    "olmoe": TWO_GROUPS,
    "deepseek_v2": EVEN,
    "glm4_moe": TWO_GROUPS,
    "gpt_oss": TWO_GROUPS,
    "minimax_m2": TWO_GROUPS,
    "glm4_moe_lite": EVEN,
    "qwen3_next": TWO_GROUPS,
    "deepseek_v32": EVEN,
    "glm_moe_dsa": EVEN | {"index_topk_freq": 2, "index_skip_topk_offset": 1},
}
"""A family a line: a case of tests/hf_models.py, and what makes it fit the meshes. Experts: 6, of deepseek 8."""


def import_of(case: str, changes: dict[str, Any], folder: Path) -> tuple[ModelConfig, Path]:
    """Import a case, with 1,003 tokens padded to a multiple of 16."""
    changes = changes | {"vocab_size": 1003}
    return oracle(case, **changes).ours, imported(saved(case, folder / case / "hf", **changes), folder / case / "ckpt")


STREAMED = {
    "one rank": (MeshConfig(), 1 << 14),
    "tp2-ep2-pp2": (MeshConfig(tp=2, ep=2, pp=2), 1 << 12),
    "tp2-etp2": (MeshConfig(tp=2, etp=2), 1 << 12),
}
"""Meshes, and the most bytes of a message, which is far less than a layer has."""
CUT_STREAMED = ("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_next")
"""Cases that are streamed from several ranks, beside one with tied embeddings."""


@pytest.mark.full
@pytest.mark.parametrize("mesh", STREAMED)
def test_weights_that_are_streamed_equal_an_export_and_need_the_memory_of_a_layer(mesh: str, tmp_path: Path) -> None:
    config, message_bytes = STREAMED[mesh]
    cases = CASES if config.smallest_world == 1 else CUT_STREAMED
    wanted = {case: import_of(case, CASES[case], tmp_path) for case in cases}
    tied = CASES["qwen3_moe"] | {"vocab_size": 1003, "tie_word_embeddings": True}
    source = saved("qwen3_moe", tmp_path / "tied hf", **tied)
    wanted["tied"] = oracle("qwen3_moe", **tied).ours, imported(source, tmp_path / "tied")
    if config.smallest_world == 1:
        mtp = write_hf(tmp_path / "mtp hf", *with_mtp())
        wanted["mtp"] = open_hf_model(mtp, vocab_multiple=16).model, imported(mtp, tmp_path / "mtp")
    wanted = {case: found for case, found in wanted.items() if fits(found[0], config)}
    assert len(wanted) == (18 if config.smallest_world == 1 else 5)
    ranks = run_ranks(streamed_weights, config.smallest_world, config, wanted, message_bytes)
    for case, (model, checkpoint) in wanted.items():
        tensors = read_hf(exported(checkpoint, tmp_path / f"{case} exported", mtp="drop"))
        if model.tied_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        to_rank = min(1, len(ranks) - 1)
        gathered = ranks[to_rank][case]
        assert gathered.tensors == {name: described(tensor) for name, tensor in tensors.items()}
        layers = [f"model.layers.{layer}." for layer in range(model.num_layers)]
        assert [name for name in gathered.buckets if "layers" in name] == layers
        largest = max(gathered.buckets.values())
        assert gathered.most_bytes <= largest + 2 * message_bytes
        for rank in (rank[case] for index, rank in enumerate(ranks) if index != to_rank):
            assert not rank.tensors
            assert rank.most_bytes <= 2 * message_bytes


def fits(model: ModelConfig, mesh: MeshConfig) -> bool:
    """Whether Megatron has the model on the mesh; it has no cut experts with biases (gpt_oss)."""
    return not list(mesh_violations(model, mesh, seq_length=32))


@pytest.mark.full
def test_a_run_starts_from_an_import_and_what_it_trains_goes_back(tmp_path: Path) -> None:
    case, changes = "qwen3_moe", TWO_GROUPS | {"vocab_size": 120}
    source = saved(case, tmp_path / "hf", **changes)
    checkpoint = imported(source, tmp_path / "ckpt")
    model = oracle(case, **changes).ours
    mesh = MeshConfig(tp=2, ep=2)
    config = config_of(tmp_path / "run", model, mesh, load=str(checkpoint), load_optimizer=False)
    run = run_ranks(trained, 2, config, 2, (2,))[0]
    assert any(str(checkpoint) in line for line in run.lines)
    trained_folder = tmp_path / "run" / "checkpoints" / "iter_0000002"
    back = exported(trained_folder, tmp_path / "back", reference=source)
    assert_same(to_global(read_hf(back), model), without_optimizer_and_padding(read_dist(trained_folder), model))
    assert len(differing(source, back)) > 100


def without_optimizer_and_padding(tensors: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Training moves the rows that pad the vocabulary; an export drops them."""
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weights[key][model.vocab_size :] = 0
    return weights


@pytest.mark.matrix("tp2-ep2")
@pytest.mark.parametrize("mesh", ["tp2-ep2", "pp2-vpp2"])
def test_the_planned_weights_are_what_ranks_hold(mesh: str) -> None:
    config = MESHES[mesh]
    models = {name: TINY[name] for name in ("qwen3_moe", "deepseek_v3")}
    models["deepseek_v3"] = models["deepseek_v3"].model_copy(update={"mtp_layers": 1})
    ranks = run_ranks(weight_bytes, config.smallest_world, config, models)
    for name, model in models.items():
        planned = weights_by_stage(model, config)
        for rank in ranks:
            stage, num_bytes = rank[name]
            saved = planned[stage].total + planned[stage].fp32_buffers
            assert num_bytes == 4 * saved, (name, stage)


def apart(one: Path, other: Path, largest_whole: int = LOGITS_BYTES) -> float:
    """On a rank: `convert verify --logits`."""
    with quiet() as progress, pytest.MonkeyPatch.context() as patched:
        patched.setattr(logits, "LOGITS_BYTES", largest_whole)
        distance = logits.largest_distance(one, other, None, progress)
    assert distance.is_small == (distance.logits <= distance.tolerance)
    assert TOLERANCE / 20 < distance.tolerance < 10 * TOLERANCE
    return distance.logits


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3-yarn", "qwen3", "gpt_oss"])
def test_verify_runs_both_models_a_layer_at_a_time(case: str, tmp_path: Path) -> None:
    source = saved(case, tmp_path / "hf")
    checkpoint = imported(source, tmp_path / "ckpt")
    assert run_ranks(apart, 1, source, checkpoint, 0)[0] <= TOLERANCE
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    assert run_ranks(apart, 1, source, checkpoint, 0)[0] > 50 * TOLERANCE


@pytest.mark.full
def test_verify_compares_the_logits_of_models_that_have_mtp_layers(tmp_path: Path) -> None:
    """Both sides leave the MTP layers out of the logits, which they do not change."""
    source = write_hf(tmp_path / "hf", *with_mtp())
    checkpoint = imported(source, tmp_path / "ckpt")
    assert any(key.startswith("mtp.") for key in read_dist(checkpoint))
    assert run_ranks(apart, 1, source, checkpoint)[0] <= TOLERANCE
    other = exported(checkpoint, tmp_path / "back", reference=source)
    assert run_ranks(apart, 1, other, checkpoint)[0] <= TOLERANCE
