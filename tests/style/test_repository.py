import ast
from functools import cache
from itertools import chain
from pathlib import Path
from symtable import symtable

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


def test_what_tests_and_benchmarks_import_of_each_other_and_of_the_package_is_there():
    """Also what tests do that `make test` leaves out, such as those beside real servers."""
    missing = []
    for file in chain.from_iterable((ROOT / folder).rglob("*.py") for folder in ("tests", "bench")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] in ("mcore_rl", "tests", "bench"):
                missing += [f"{file}: {module}.{one.name}" for one in node.names if one.name not in names_of(module)]
    assert missing == []


@cache
def names_of(module):
    """Return the names that can be imported from a module, with the modules of a package."""
    path = ROOT / module.replace(".", "/")
    file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)
    text = "" if file is None else file.read_text(encoding="utf-8")
    return {*symtable(text, module, "exec").get_identifiers(), *(one.stem for one in path.glob("*"))}
