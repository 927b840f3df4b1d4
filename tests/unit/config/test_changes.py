"""Which changes of a config a resume may not make by itself."""

from typing import Any

import pytest

from mcore_rl.config.changes import config_changes
from mcore_rl.config.rl_run import RlRunConfig


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
