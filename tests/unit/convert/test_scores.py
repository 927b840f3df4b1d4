"""Reward models as transformers' models for sequence classification, there and back."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.exporting import ExportOptions, plan_export, score_padding
from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES, hf_config, model_from_hf
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from tests.conversion import ONE_FILE, exported, imported
from tests.hf_models import CASES, TOLERANCE, random_tokens, randomize
from tests.tiny_models import TINY

WITHOUT = (
    *("deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2", "olmoe"),
    *("qwen3_5_moe_text", "solar_open"),
)


@pytest.mark.matrix("deepseek_v3")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3", "deepseek_v3", "gpt_oss"])
def test_scores_are_those_of_transformers_and_weights_come_back_bit_for_bit(
    name: str, one_rank: Mesh, tmp_path: Path
) -> None:
    prefix, settings = CASES[name]
    config = getattr(transformers, f"{prefix}Config")(**settings, num_labels=1, pad_token_id=0)
    config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{prefix}ForSequenceClassification")(config).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "hf")

    imported(tmp_path / "hf", tmp_path / "ours")
    described = model_from_hf(json.loads((tmp_path / "hf/config.json").read_text()))
    model = described.model_copy(update={"vocab_multiple": 16})
    assert model.head == "score"
    platform = PlatformConfig()
    chunk = build_model(model, one_rank, start(platform), platform)[0].eval()
    load_weights([chunk], one_rank, model, tmp_path / "ours")
    tokens_BS = random_tokens().clamp(min=1)
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    with torch.no_grad():
        scores_BS1 = chunk(tokens_BS, positions_BS, None)
        wanted_B1 = theirs(tokens_BS).logits
    assert (scores_BS1[:, -1] - wanted_B1).abs().max() < TOLERANCE * max(1.0, wanted_B1.abs().max())

    # A shift is no part of the weights: transformers' scores are higher by it, and the export says so.
    with torch.no_grad():
        unwrap(chunk).output_layer.shift.fill_(0.25)
    save_weights([chunk], one_rank, model, tmp_path / "shifted")
    plan = plan_export(tmp_path / "shifted", tmp_path / "again", ExportOptions(), ONE_FILE)
    assert any("scores are +0.25 higher than here" in note for note in plan.notes)
    exported(tmp_path / "shifted", tmp_path / "again")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("hf", "again"))
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "again", attn_implementation="eager"
    ).eval()
    assert again.config.num_labels == 1 and again.config.pad_token_id is None
    assert torch.equal(before["score.weight"], after["score.weight"])
    with torch.no_grad():
        one_by_one = torch.cat([again(tokens_BS[row : row + 1]).logits for row in range(2)])
        ours_B1 = chunk(tokens_BS, positions_BS, None)[:, -1]
    assert (one_by_one - wanted_B1).abs().max() < TOLERANCE
    assert (ours_B1 + 0.25 - one_by_one).abs().max() < TOLERANCE * max(1.0, wanted_B1.abs().max())


@pytest.mark.parametrize(("pad", "wanted"), [(3, 3), (2, None), (None, None)])
def test_padding_that_is_also_the_end_of_a_text_is_not_where_scores_are_read(
    pad: int | None, wanted: int | None
) -> None:
    special, notes = score_padding({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": pad})
    assert special["pad_token_id"] == wanted and bool(notes) == (wanted is None)


def test_families_without_such_a_class_are_refused_by_name() -> None:
    known = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    assert {name for name in FAMILIES if name not in known} == set(WITHOUT)
    for name in FAMILIES:
        if name in WITHOUT:
            with pytest.raises(ConfigError, match=f"transformers has no class of {name} for sequence"):
                hf_config(TINY[name].scored)
        elif name in TINY:
            config = hf_config(TINY[name].scored)
            assert config["architectures"] == [known[name]] and config["num_labels"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, "has 2 labels"),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, "Known are language models"),
    ],
)
def test_classifiers_are_refused(changes: dict[str, object], message: str) -> None:
    config = hf_config(TINY["qwen3_moe"].scored)
    del config["num_labels"]
    with pytest.raises(ConfigError, match=message):
        model_from_hf(config | changes)
