from pathlib import Path

import pytest

from tests.style.rules import RULES, TREE_RULES, parse

ROOT = Path(__file__).parents[2]


def parsed(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    return [parse(str(file.relative_to(ROOT).as_posix()), file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture(scope="module")
def sources():
    return parsed("mcore_rl")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_of_mcore_rl_keeps_the_rule(rule, sources):
    assert [offence for source in sources for offence in rule(source)] == []


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
def test_mcore_rl_as_a_whole_keeps_the_rule(rule, sources):
    assert list(rule(sources)) == []
