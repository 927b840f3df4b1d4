from pathlib import Path

from bench.house import RL_PROGRAMS, function_lengths, import_closure, lines_by_kind

ROOT = Path(__file__).parents[3]
FILE = '"""A."""\n\nimport os\n\n# why\nx = 1  # not a line of its own\n"""An x."""\n\n\ndef f():\n    return os.sep\n'


def test_each_line_is_of_one_kind():
    assert lines_by_kind(FILE) == {"docstrings": 2, "blank": 4, "imports": 1, "comments": 1, "code": 3}
    assert function_lengths(FILE) == [2]


def test_a_closure_has_the_packages_above_and_nothing_for_types_alone(tmp_path):
    for name, text in {
        "mcore_rl/__init__.py": "",
        "mcore_rl/a.py": "if TYPE_CHECKING:\n    import mcore_rl.c\nfrom mcore_rl.p import b\n",
        "mcore_rl/c.py": "",
        "mcore_rl/p/__init__.py": "",
        "mcore_rl/p/b.py": "def f():\n    import mcore_rl.c\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert import_closure(tmp_path, "mcore_rl.a").keys() == {"mcore_rl", "mcore_rl.a", "mcore_rl.p", "mcore_rl.p.b"}


NOT_NEEDED = (
    *("convert", "report", "launch", "families.deepseek", "data.megatron.indexed", "data.preferences"),
    *("rl.engines.served", "rl.engines.native", "rl.environments", "rl.models", "rl.rewards.from_model"),
    *("model.layers.delta", "model.layers.indexed", "model.layers.cpu", "model.adapters", "model.layers.adapters"),
    *("metrics.loggers", "data.index_file", "config.other_names", "rl.step.trace"),
)


def test_reinforcement_learning_imports_few_modules_and_none_of_what_a_run_need_not_have():
    closure = import_closure(ROOT, RL_PROGRAMS[0])
    unwanted = tuple(f"mcore_rl.{feature}." for feature in NOT_NEEDED)
    assert [name for name in closure if f"{name}.".startswith(unwanted)] == []
    assert len(closure) <= 175
    assert sum(closure.values()) <= 38_000
