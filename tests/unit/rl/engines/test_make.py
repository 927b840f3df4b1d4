"""A rollout engine of the user's own: what it lacks is named when the run starts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Capabilities, QuietEngine, asking, make_engine
from mcore_rl.rl.types import Group

RECIPE = Path("launch/recipes/tiny_moe/grpo.toml")


class Bare:
    """An engine that makes completions and has no other member of the protocol."""

    capabilities = Capabilities(max_tokens=8, routes=False, seeded=True)
    policy_version = 0

    def decode(self, tokens_T: Sequence[int], /) -> str:
        return ""

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def generate(self, *arguments: Any) -> list[Group]:
        return []


class Whole(Bare, QuietEngine):
    """The same with the base that reports nothing."""


def bare(*arguments: Any) -> Any:
    return Bare()


def whole(*arguments: Any) -> Any:
    return Whole()


def made(make: Callable[..., Any], mesh: Mesh) -> Any:
    config = load_config(RlRunConfig, RECIPE, [f'rl.engine.kind="{__name__}:{make.__name__}"'])
    return make_engine(config, [], mesh, lambda tokens_T: "")


def test_an_engine_without_a_part_of_the_protocol_is_refused_with_its_names(one_rank: Mesh) -> None:
    with pytest.raises(ConfigError) as refused:
        made(bare, one_rank)
    assert "makes Bare, which has no describe, listen, take_lines, take_metrics, close" in str(refused.value)
    assert "QuietEngine as a base has describe, listen, take_lines, take_metrics, close" in str(refused.value)
    engine = made(whole, one_rank)
    assert (engine.describe(), engine.take_lines(), engine.take_metrics()) == ([], [], [])


def test_an_engine_that_cannot_generate_while_the_policy_trains_is_refused(one_rank: Mesh) -> None:
    with pytest.raises(ConfigError, match="Whole, has no `asks`"):
        asking(made(whole, one_rank))
