"""Each rule sees the offence it is there for, at its line, and lets the lawful neighbour pass."""

import pytest

from tests.style import rules
from tests.style.rules import parse


@pytest.mark.parametrize(
    ("rule", "path", "text", "line"),
    [
        (rules.imports_point_down, "config/a.py", "x = 1\nfrom mcore_rl.megatron.platform import start", 2),
        (rules.imports_point_down, "data/a.py", "def f():\n    import mcore_rl.train.step", 2),
        (rules.imports_point_down, "convert/a.py", "import mcore_rl.train.step", 1),
        (rules.imports_point_down, "report/a.py", "import mcore_rl.train.step", 1),
        (rules.packages_are_floors, "helpers/a.py", "", 1),
        (
            rules.only_the_mesh_asks_parallel_state,
            "model/a.py",
            "tp = ProcessGroupCollection.use_mpu_process_groups(['tp']).tp",
            1,
        ),
        (rules.only_the_mesh_asks_parallel_state, "train/a.py", "from megatron.core import parallel_state", 1),
        (rules.only_the_mesh_asks_parallel_state, "train/a.py", "from megatron.core.parallel_state import get_x", 1),
        (rules.compiled_layers_have_one_door, "rl/a.py", "import mcore_rl.megatron.compiled", 1),
        (rules.compiled_layers_have_one_door, "model/build.py", "x = 1\nimport mcore_rl.model.layers.cpu.experts", 2),
        (rules.engines_are_one_protocol, "rl/trainer.py", "if isinstance(engine, ServedEngine):\n    x()", 1),
        (rules.engines_are_one_protocol, "cli/a.py", "x = 1\nisinstance(x.y, base.AskingEngine | None)", 2),
        (rules.megatron_stays_in_its_packages, "cli/a.py", "import megatron.core", 1),
        (rules.megatron_stays_in_its_packages, "metrics/a.py", "from megatron.core import x", 1),
        (rules.imports_are_absolute, "train/a.py", "from .state import x", 1),
        (rules.nothing_prints, "train/a.py", "def f():\n    print(1)", 2),
        (rules.errors_are_caught_by_name, "train/a.py", "try:\n    f()\nexcept Exception:\n    pass", 3),
        (rules.errors_are_caught_by_name, "train/a.py", "try:\n    f()\nexcept:\n    pass", 3),
        (
            rules.errors_are_caught_by_name,
            "train/a.py",
            "try:\n    f()\nexcept (OSError, BaseException) as error:\n    g(error)",
            3,
        ),
        (rules.the_environment_is_read_in_its_rooms, "train/a.py", "import os\nos.environ['A']", 2),
        (rules.the_environment_is_read_in_its_rooms, "train/a.py", "import os\nx = os.getenv('A')", 2),
        (rules.the_environment_is_read_in_its_rooms, "train/a.py", "from os import environ", 1),
        (rules.only_files_renames, "train/a.py", "import os\nos.replace(a, b)", 2),
        (rules.only_files_renames, "train/a.py", "from os import rename", 1),
        (rules.only_files_renames, "train/a.py", "scratch.with_suffix('.x').replace(path)", 1),
        (rules.only_files_renames, "train/a.py", "(folder / 'a').rename(folder / 'b')", 1),
        (rules.module_globals_do_not_change, "train/a.py", "x = 1\ndef f():\n    global x\n    x = 2", 3),
        (rules.module_globals_do_not_change, "train/a.py", "X = {}\ndef f():\n    X['a'] = 2", 3),
        (rules.module_globals_do_not_change, "train/a.py", "X: list[int] = []\ndef f():\n    X.append(2)", 3),
        (rules.module_globals_do_not_change, "train/a.py", "X = defaultdict(int)\ndef f():\n    X[1] += 2", 3),
        (rules.public_things_are_documented, "train/a.py", "x = 1", 1),
        (rules.public_things_are_documented, "train/a.py", '"""A."""\ndef f(): ...', 2),
        (rules.public_things_are_documented, "train/a.py", '"""A."""\nclass A:\n    """B."""\n    def f(): ...', 4),
        (rules.docstrings_have_a_subject, "train/a.py", '"""A."""\nx = 1\n"""Of each rank."""', 3),
    ],
)
def test_an_offence_is_seen_at_its_line(rule, path, text, line):
    offences = list(rule(parse(f"mcore_rl/{path}", text)))
    assert [offence.split(": ")[0] for offence in offences] == [f"mcore_rl/{path}:{line}"]


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (rules.imports_point_down, "train/a.py", "import mcore_rl.train.b, mcore_rl.errors\nimport torch"),
        (rules.imports_point_down, "cli/a.py", "from mcore_rl import __version__"),
        (rules.packages_are_floors, "errors.py", ""),
        (rules.only_the_mesh_asks_parallel_state, "megatron/mesh.py", "from megatron.core import parallel_state"),
        (rules.megatron_stays_in_its_packages, "model/a.py", "import megatron.core"),
        (rules.errors_are_caught_by_name, "train/a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
        (rules.errors_are_caught_by_name, "train/a.py", "try:\n    f()\nexcept (OSError, KeyError):\n    pass"),
        (rules.the_environment_is_read_in_its_rooms, "megatron/a.py", "import os\nos.environ['A']"),
        (rules.only_files_renames, "train/a.py", "'a b'.replace(' ', '')\nreplace(x)\nself.replace(f)"),
        (rules.only_files_renames, "storage/files.py", "import os\nos.replace(a, b)"),
        (rules.engines_are_one_protocol, "rl/engines/base.py", "isinstance(engine, AskingEngine)"),
        (rules.engines_are_one_protocol, "rl/a.py", "isinstance(error, EngineError)"),
        (rules.module_globals_do_not_change, "train/a.py", "X = {}\ndef f():\n    x = {}\n    x['a'] = X['a']"),
        (rules.public_things_are_documented, "train/a.py", '"""A."""\ndef _f(): ...'),
        (rules.docstrings_have_a_subject, "train/a.py", '"""A."""\nx = 1\n"""Ranks of the group."""'),
    ],
)
def test_what_is_lawful_passes(rule, path, text):
    assert list(rule(parse(f"mcore_rl/{path}", text))) == []


def test_every_rule_is_shown_an_offence():
    shown = {row[0] for row in test_an_offence_is_seen_at_its_line.pytestmark[0].args[1]}
    assert shown == {*rules.RULES}


def test_patches_must_come_before_megatron():
    user = parse("mcore_rl/model/build.py", "import megatron.core")
    good = parse("mcore_rl/model/__init__.py", "import mcore_rl.megatron.patches.table\nimport torch")
    late = parse("mcore_rl/model/__init__.py", "import torch\nimport mcore_rl.megatron.patches.table")
    assert list(rules.patches_come_before_megatron([user, good])) == []
    assert len(list(rules.patches_come_before_megatron([user, late]))) == 1
    assert list(rules.patches_come_before_megatron([late])) == []
    careless = parse("mcore_rl/megatron/patches/part.py", "import megatron.core")
    assert len(list(rules.patches_come_before_megatron([careless]))) == 1
    part = parse("mcore_rl/megatron/patches/part.py", "def replacement():\n    import megatron.core")
    assert list(rules.patches_come_before_megatron([part])) == []


def test_circles_of_imports_are_found_and_named():
    a = parse("mcore_rl/train/a.py", "from mcore_rl.train.b import x")
    b = parse("mcore_rl/train/b.py", "import mcore_rl.train.c")
    c = parse("mcore_rl/train/c.py", "def f():\n    from mcore_rl.train import a")
    assert (
        list(rules.modules_do_not_go_in_circles([a, b]))
        == []
        == list(rules.modules_do_not_go_in_circles([b, c, parse("mcore_rl/train/a.py", "")]))
    )
    assert list(rules.modules_do_not_go_in_circles([a, b, c])) == [
        "mcore_rl.train.a imports mcore_rl.train.b imports mcore_rl.train.c imports mcore_rl.train.a"
    ]


def test_light_packages_stay_light_also_by_way_of_others():
    page = parse("mcore_rl/planning/page.py", "import mcore_rl.metrics.table")
    table = parse("mcore_rl/metrics/table.py", "import torch")
    assert len(list(rules.light_packages_stay_light([page, table]))) == 1
    assert list(rules.light_packages_stay_light([page, parse("mcore_rl/metrics/table.py", "import json")])) == []
    assert list(rules.light_packages_stay_light([table])) == []


def test_a_name_means_one_thing_on_a_floor():
    step = parse("mcore_rl/train/step.py", "X = 1\ndef main(): ...\ndef _f(): ...")
    copy = parse("mcore_rl/convert/copy.py", "from mcore_rl.a import X\ndef main(): ...\ndef _f(): ...")
    assert list(rules.names_differ_on_a_floor([step, copy])) == []
    for text in ("X = 2", "X: int = 2", "class X: ...", "def X(): ..."):
        other = parse("mcore_rl/convert/hf/folder.py", text)
        assert list(rules.names_differ_on_a_floor([step, other])) == [
            "mcore_rl/convert/hf/folder.py:1: X is a name of mcore_rl/train/step.py too"
        ]
        assert list(rules.names_differ_on_a_floor([step, parse("mcore_rl/rl/folder.py", text)])) == []
