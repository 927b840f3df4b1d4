"""Models that other versions of this program have recorded, and settings that are not in use."""

import pytest

from mcore_rl.config.model import RopeConfig
from mcore_rl.families.same_model import model_changes
from tests.tiny_models import TINY


@pytest.mark.parametrize("family", TINY)
def test_a_model_is_the_one_that_any_version_has_recorded_of_it(family: str) -> None:
    model = TINY[family]
    record = model.model_dump(mode="json")
    assert model_changes(record, model) == []
    # Settings that are newer than the record have their defaults; those that are newer than this version are not known.
    assert model_changes({name: value for name, value in record.items() if name != "qk_norm"}, model) == (
        [] if model.qk_norm == "auto" else model_changes(record | {"qk_norm": "auto"}, model)
    )
    later = record | {"gating": "on", "rope": record["rope"] | {"interleaved": True}}
    assert model_changes(later, model) == []
    later["rope"]["theta"] = 5e6
    assert [change.key for change in model_changes(later, model)] == ["model.rope.theta"]


def test_a_scalar_head_takes_the_layers_of_tied_and_untied_models() -> None:
    model = TINY["qwen3_moe"]
    tied = model.model_copy(update={"tied_embeddings": True, "mtp_layers": 1}).model_dump(mode="json")
    assert [change.key for change in model_changes(tied, model)] == ["model.tied_embeddings"]
    assert model_changes(tied, model.scored) == []


def test_what_a_model_does_not_read_makes_no_other_one_of_it() -> None:
    latent, dense, routed = TINY["deepseek_v3"], TINY["llama"], TINY["qwen3_moe"]
    assert model_changes(latent.model_dump(mode="json") | {"head_dim": 99, "num_kv_heads": 1}, latent) == []
    assert model_changes(routed.model_dump(mode="json") | {"ffn_hidden_size": 9}, routed) == []
    unused = dense.model_dump(mode="json")
    unused["moe"] |= {"top_k": 7, "routed_scaling": 3.0}
    unused["mla"]["norm_eps"] = 1.0
    assert model_changes(unused, dense) == []
    stretched = dense.model_copy(
        update={"rope": RopeConfig(scaling="yarn", factor=8.0, original_length=64, mscale=2.0)}
    )
    # The factor alone would not be refused: the setting that says what is read differs, and is reported.
    changes = model_changes(stretched.model_dump(mode="json"), dense)
    assert [str(change) for change in changes] == ['model.rope.scaling is "yarn" there, "none" here']
