"""Which changes of a config a resume may not make by itself."""

from typing import Any

import pytest

from mcore_rl.config.changes import config_changes
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.sft import SFTConfig


@pytest.mark.parametrize(
    ("ptx", "refused"),
    [
        ({"files": ("other.jsonl",)}, {"rl.ptx.files"}),
        ({"sequences": 4}, {"rl.ptx.sequences"}),
        ({"files": (), "tokens": ("text",)}, {"rl.ptx.files", "rl.ptx.tokens"}),
        ({"coeff": 0.2}, set()),
    ],
)
def test_other_texts_beside_the_policys_updates_are_other_data(
    ptx: dict[str, Any], refused: set[str]
) -> None:
    texts = {"coeff": 0.1, "files": ("chat.jsonl",)}
    before, now = (RlRunConfig.model_validate({"rl": {"ptx": one}}) for one in (texts, texts | ptx))
    changes = config_changes(before.model_dump(mode="json"), now)
    assert changes
    assert {change.key for change in changes if change.breaks_exactness} == refused


def test_a_run_from_before_data_shuffle_read_megatrons_order() -> None:
    now = PretrainConfig()
    recorded = now.model_dump(mode="json")
    assert config_changes(recorded, now) == []
    del recorded["data"]["shuffle"]
    (change,) = config_changes(recorded, now)
    assert str(change) == 'data.shuffle is "whole" there, "epoch" here'
    assert change.breaks_exactness
    whole = PretrainConfig.model_validate({"data": {"shuffle": "whole"}})
    assert config_changes(recorded, whole) == []
    assert config_changes(SFTConfig().model_dump(mode="json"), SFTConfig()) == []
