"""docs/families.md lists what is supported and what is refused, and each is refused by the sentence there."""

import re
from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES, OTHER_MODEL_TYPES, model_from_hf
from mcore_rl.families.refused import REFUSED
from mcore_rl.families.shells import SHELLS

PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def rows(title: str) -> dict[str, str]:
    """By `model_type`, the last cell of each row of the table under a title of the page."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", section, re.M)}


def test_the_page_lists_every_family_and_every_refused_architecture() -> None:
    assert rows("Supported").keys() == FAMILIES.keys()
    assert rows("Text models inside models of images").keys() == SHELLS.keys()
    assert rows("Refused") == REFUSED
    assert not REFUSED.keys() & {*FAMILIES, *sum(OTHER_MODEL_TYPES.values(), ())}


@pytest.mark.parametrize("model_type", REFUSED)
def test_it_is_refused_by_the_sentence_of_the_page(model_type: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model_from_hf({"model_type": model_type})
    reason = rows("Refused")[model_type]
    assert f"model_type={model_type!r}, which is refused: {reason}." in str(refused.value)
