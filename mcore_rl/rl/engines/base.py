"""What every rollout engine is: in this process or a server, it makes completions of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.config.rl import RolloutConfig
from mcore_rl.errors import EngineError
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Group, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are drawn, and where they end."""

    max_new_tokens: int
    cut: Cut = field(default_factory=Cut)
    stop_tokens: frozenset[int] = frozenset()
    """With the token that ends a document, if that is to end a completion."""
    stop_strings: tuple[str, ...] = ()
    with_routes: bool = False
    """Record the experts of each token and layer."""


def sampling_of(config: RolloutConfig, eod_id: int, *, with_routes: bool) -> Sampling:
    """What a config says; `eod_id` ends completions too."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        cut=Cut(
            temperature=config.temperature, top_k=config.top_k or 0, top_p=config.top_p, min_p=config.min_p
        ),
        stop_tokens=frozenset((eod_id, *config.stop_tokens)),
        stop_strings=config.stop_strings,
        with_routes=with_routes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do, so that a run is refused before it starts."""

    max_tokens: int
    """Of prompt and completion together."""
    routes: bool
    """Completions can carry the experts of each token and layer."""
    seeded: bool
    """A completion depends on weights, prompt, sampling and its seed only, not on what is computed beside it."""


class Engine(Protocol):
    """Completions of prompts under the weights of `policy_version`."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""

    @property
    def policy_version(self) -> int:
        """Of the weights in use; every completion is marked with it."""

    def decode(self, tokens_T: Sequence[int], /) -> str:
        """The text of a completion, or of its first tokens."""

    def update_weights(self, policy_version: int) -> None:
        """Collective over the engine's ranks: from here on it uses the policy's present weights."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Collective over the engine's ranks: a group a prompt, in order, with a completion a seed, in order.

        EngineError before any work when a request cannot be served.
        """


def check_request(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seeds_PG: Sequence[Sequence[int]],
    capabilities: Capabilities,
) -> None:
    """EngineError for what no engine of these capabilities can serve."""
    assert len(prompts) == len(seeds_PG), (len(prompts), len(seeds_PG))
    if sampling.with_routes and not capabilities.routes:
        raise EngineError(
            "routes were asked for, and this model or engine has none. Ask for completions only."
        )
    for prompt in prompts:
        longest = len(prompt.tokens_T) + sampling.max_new_tokens
        if not prompt.tokens_T:
            raise EngineError(
                f"prompt {prompt.problem.problem_id} has no tokens: give it at least one, such as the token that "
                "ends documents."
            )
        if longest > capabilities.max_tokens:
            raise EngineError(
                f"prompt {prompt.problem.problem_id} has {len(prompt.tokens_T)} tokens and asks for "
                f"{sampling.max_new_tokens} more, {longest} in all; the engine holds {capabilities.max_tokens}. "
                "Shorten prompts or rollout.max_new_tokens, or enlarge the engine."
            )
