"""Interface of a rollout engine, in this process or a server: prompts in, completions of token ids out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mcore_rl.config.rl.rollout import RolloutConfig
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.obs.metrics import Metric
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Group, Prompt

MARGIN = 8
"""Tokens read beyond those that a stop string can have: some decode to nothing, the first may lose its space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Rules by which tokens are sampled and completions end."""

    max_new_tokens: int
    cut: Cut = field(default_factory=Cut)
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end a completion; the one that ends a document has to be among them, if it is to end one."""
    stop_strings: tuple[str, ...] = ()
    vocab_size: int | None = None
    """Number of ids that the tokenizer has. A larger id, which pads the model's vocabulary, is never drawn and has no
    probability, in training alike; None: the model's own number."""
    with_routes: bool = False
    """Whether the experts of each token and layer are recorded."""


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Strings that end a completion."""

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def end(self, tokens_T: Sequence[int]) -> bool:
        """Whether one of them ends the completion with its newest token; none did before."""
        longest = max(len(string.encode()) for string in self.strings)
        tail = self.decode(tokens_T[-longest - MARGIN :])
        return any(string in tail for string in self.strings)


def sampling_of(
    config: RolloutConfig, end_ids: Iterable[int], *, vocab_size: int, with_routes: bool
) -> Sampling:
    """Return the sampling of a config; completions end with the tokens `end_ids`, and have ids below `vocab_size`."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        cut=Cut(
            temperature=config.temperature, top_k=config.top_k or 0, top_p=config.top_p, min_p=config.min_p
        ),
        stop_tokens=frozenset(end_ids),
        stop_strings=config.stop_strings,
        vocab_size=vocab_size,
        with_routes=with_routes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Abilities of an engine, so that a run is refused before it starts."""

    max_tokens: int
    """Largest number of tokens of prompt and completion together."""
    routes: bool
    """Whether completions can carry the experts of each token and layer."""
    seeded: bool
    """Whether a completion depends on weights, prompt, sampling and its seed only, not on other completions."""


class Engine(Protocol):
    """Generates completions of prompts under the weights of `policy_version`."""

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of this engine."""

    @property
    def policy_version(self) -> int:
        """Version (optimizer step) of the weights in use, which every completion records."""

    def decode(self, tokens_T: Sequence[int], /) -> str:
        """Return the text of a completion, or of its first tokens."""

    def update_weights(self, policy_version: int) -> None:
        """Collective over the engine's ranks: use the policy's weights as they are now, from here on."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Collective over the engine's ranks: return a group for each prompt, with a completion for each of its seeds,
        both in order. Raises EngineError before any work when a request cannot be served.
        """

    def describe(self) -> list[str]:
        """Return lines for the log at the start of a run, after the first update of the weights."""

    def listen(self, message: Callable[[str], None], /) -> None:
        """Call `message` with a line for the log, at once and from any thread, when something happens to the engine."""

    def take_lines(self) -> list[str]:
        """Return lines for the log on what happened since the last call."""

    def take_metrics(self) -> list[Metric]:
        """Return the engine's own metrics since the last call; the metrics of completions are not among them."""

    def close(self) -> None:
        """End what the engine has started: threads, requests, servers."""


class QuietEngine:
    """Base of an engine that has nothing to report, and nothing to end: the last five methods of `Engine`."""

    def describe(self) -> list[str]:
        """Return no line."""
        return []

    def listen(self, message: Callable[[str], None], /) -> None:
        """Call nothing: nothing happens to the engine."""

    def take_lines(self) -> list[str]:
        """Return no line."""
        return []

    def take_metrics(self) -> list[Metric]:
        """Return no metric."""
        return []

    def close(self) -> None:
        """End nothing."""


@runtime_checkable
class AskingEngine(Engine, Protocol):
    """An engine outside of this process, which one rank of each replica asks, while the others train."""

    @property
    def asks(self) -> bool:
        """Whether this rank asks for the groups of its replica: the first one of the model."""

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the group of a prompt, with a completion for each seed; not collective, and safe to call from several
        threads, also while `update_weights` or `generate` runs. Raises EngineError where no server gives it.
        """

    def of_this_stage(self, group: Group) -> Group:
        """Return a group of `request_group`, whose completions have the routes of all layers, with those of this
        pipeline stage's layers alone.
        """


def asking(engine: Engine) -> AskingEngine:
    """Return the engine, which generates while the policy trains; ConfigError for one that does not."""
    if not isinstance(engine, AskingEngine):
        raise ConfigError(
            f"rl.rollout.max_staleness is above 0, and the rollout engine, {type(engine).__name__}, has no `asks`, "
            "`request_group` and `of_this_stage` (rl.engines.base.AskingEngine) to generate while the policy trains. "
            "Give it these, or set max_staleness=0."
        )
    return engine


def check_request(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seeds_PG: Sequence[Sequence[int]],
    capabilities: Capabilities,
) -> None:
    """Raise EngineError for a request that an engine with these capabilities cannot serve."""
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
