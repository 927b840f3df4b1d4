"""Sections that are unions by kind: each kind has its own fields, and no other."""

from pathlib import Path
from typing import Annotated, Literal

import pytest

from mcore_rl.config.changes import config_changes
from mcore_rl.config.describe import describe, describe_sections
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.rl.loss import GaeAdvantage, GspoLoss
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.section import ByKind, Section
from mcore_rl.errors import ConfigError


class Fence(Section):
    """Fence around a shape."""

    height: int = 1
    """In metres."""


class Shape(Section):
    """A shape."""

    kind: str
    """Its name."""
    color: str = "red"
    """Its color."""


class Square(Shape):
    """All sides are alike."""

    kind: Literal["square"] = "square"
    side: int = 1
    """Length of a side."""


class Round(Shape):
    """No corners."""

    kind: Literal["circle", "ball"] = "circle"
    radius: int = 2
    """Distance from the middle."""
    color: str = "blue"
    fence: Fence = Fence()


class Drawing(Section):
    """A drawing."""

    shape: Annotated[Square | Round, ByKind()] = Square()


def drawing(*overrides: str, path: Path | None = None) -> Square | Round:
    return load_config(Drawing, path, overrides).shape


def test_the_kind_chooses_the_section() -> None:
    assert drawing() == Square(side=1, color="red")
    assert drawing("shape.kind=ball", "shape.radius=3") == Round(kind="ball", radius=3, color="blue")
    assert drawing("shape.kind=circle", "shape.fence.height=5").fence == Fence(height=5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["shape.radius=3"],
            r'shape\.radius = 3 on the command line: shape\.kind="square" has no such field, which is of '
            r'"circle", "ball"\. Leave it out',
        ),
        (["shape.kind=ball", "shape.side=3"], r'shape\.kind="ball" has no such field, which is of "square"'),
        (["shape.fence.height=3"], r'shape\.fence\.height = 3 .* which is of "circle", "ball"'),
        (
            ["shape.kind=oval", "shape.radius=3"],
            r'^shape\.kind = "oval" .*: expected one of "square", "circle", "ball"',
        ),
        (["shape.kind=circle", "shape.radius=x"], r'shape\.radius = "x" .*: expected an integer'),
        (["shape.kind=circle", "shape.raduis=3"], r"Unknown key shape\.raduis .* Did you mean shape\.radius\?"),
        (["shape=3"], r"shape is a section; set its fields, as shape\.kind"),
    ],
)
def test_a_field_of_another_kind_is_refused_with_the_kinds_that_have_it(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drawing(*overrides)


def test_none_clears_a_field_of_a_file_whose_kind_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text('[shape]\nkind = "ball"\nradius = 3\ncolor = "green"\n')
    with pytest.raises(ConfigError, match=r"shape\.radius = 3 in .*file\.toml: "):
        drawing("shape.kind=square", path=path)
    assert drawing("shape.kind=square", "shape.radius=none", path=path) == Square(color="green")


def test_each_field_is_described_with_its_kinds() -> None:
    (_, shape, fence) = describe_sections(Drawing)
    assert (shape.key, shape.meaning, fence.key) == ("shape", "A shape.", "shape.fence")
    assert [(doc.key, doc.default, str(doc.choice or ""), doc.meaning) for doc in describe(Drawing)] == [
        ("shape.kind", '"square"', "", "Its name."),
        ("shape.color", '"red"', "square", "Its color."),
        ("shape.color", '"blue"', "circle, ball", "Its color."),
        ("shape.side", "1", "square", "Length of a side."),
        ("shape.radius", "2", "circle, ball", "Distance from the middle."),
        ("shape.fence.height", "1", "circle, ball", "In metres."),
    ]


@pytest.mark.parametrize("kind", ["grpo", "ppo", "gspo", "gspo_token", "rspo", "kimi_k2", "cispo", "own.module:loss"])
def test_a_loss_of_each_kind_is_written_and_read_back_equal(kind: str, tmp_path: Path) -> None:
    config = load_config(RlRunConfig, None, [f"rl.loss.kind={kind}", "rl.advantage.kind=gae"])
    (tmp_path / "written.toml").write_text(dump_config(config))
    assert load_config(RlRunConfig, tmp_path / "written.toml") == config
    assert RlRunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_change_of_kind_between_runs_is_listed_as_one() -> None:
    before = load_config(RlRunConfig, None, ["rl.loss.kind=kimi_k2", "rl.advantage.kind=gae"])
    now = load_config(RlRunConfig, None, ["rl.loss.kind=gspo", "rl.loss.kl_coeff=0.1"])
    changes = config_changes(before.model_dump(mode="json"), now)
    assert {change.key for change in changes} == {"rl.loss.kind", "rl.loss.kl_coeff", "rl.advantage.kind"}
    assert isinstance(before.rl.advantage, GaeAdvantage) and isinstance(now.rl.loss, GspoLoss)
