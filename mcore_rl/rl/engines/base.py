"""Interface of a rollout engine, which generates completions of prompts, in this process or on servers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.rollout import RolloutConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.answer_ends import GrowingText
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Group, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters and stop rules of completions."""

    max_new_tokens: int
    cut: Cut = field(default_factory=Cut)
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end a completion. The end-of-document token must be included if it should end completions."""
    stop_strings: tuple[str, ...] = ()
    vocab_size: int | None = None
    """Number of ids of the tokenizer; None: the model's vocabulary size. Larger ids only pad the model's vocabulary:
    they are never drawn and have no probability, as in training."""
    with_routes: bool = False
    """Whether the experts of each token and layer are recorded."""


class StopStrings:
    """Strings that end a completion, whose tokens are read as they are sampled."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings, self._text, self._tail = strings, GrowingText(decode), ""

    def end(self, token: int) -> bool:
        """Read the next token. Returns whether it is the first one after which a stop string is certain."""
        self._tail = self._tail[-max(map(len, self._strings)) :] + self._text.add(token)
        return any(string in self._tail for string in self._strings)


def sampling_of(config: RolloutConfig, end_ids: Iterable[int], *, vocab_size: int, with_routes: bool) -> Sampling:
    """Return the sampling of a config. Completions end at the tokens `end_ids` and have ids below `vocab_size`."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        cut=Cut(temperature=config.temperature, top_k=config.top_k or 0, top_p=config.top_p, min_p=config.min_p),
        stop_tokens=frozenset(end_ids),
        stop_strings=config.stop_strings,
        vocab_size=vocab_size,
        with_routes=with_routes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Capabilities of an engine. A run that needs more is refused before it starts."""

    max_tokens: int
    """Maximum number of tokens of prompt and completion together."""
    routes: bool
    """Whether completions can carry the experts of each token and layer."""
    seeded: bool
    """Whether a completion depends only on weights, prompt, sampling and seed, and not on other completions."""


class Engine(Protocol):
    """Generates completions of prompts with the weights of `policy_version`."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of this engine."""

    @property
    def policy_version(self) -> int:
        """Version (optimizer step) of the weights in use, which every completion records."""

    def decode(self, tokens_T: Sequence[int], /) -> str:
        """Return the text of tokens; that of a part of them need not be a part of their text (data/answer_ends.py)."""

    def update_weights(self, policy_version: int) -> None:
        """Collective over the engine's ranks: switch to the policy's current weights."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Collective over the engine's ranks: return a group for each prompt, with a completion for each of its seeds,
        both in order. Raises EngineError before any work if a request cannot be served.
        """

    def describe(self) -> list[str]:
        """Return log lines for the start of a run, after the first weight update."""

    def listen(self, message: Callable[[str], None], /) -> None:
        """Register `message`, to be called at once, from any thread, with a log line on each event of the engine."""

    def take_lines(self) -> list[str]:
        """Return log lines on the engine's events since the last call."""

    def take_metrics(self) -> list[Metric]:
        """Return the engine's own metrics since the last call, which exclude metrics of completions."""

    def close(self) -> None:
        """End everything that the engine has started: threads, requests, servers."""


class QuietEngine:
    """Base class of engines that have nothing to report and nothing to close: the last five methods of `Engine`."""

    def describe(self) -> list[str]:
        """Return no lines."""
        return []

    def listen(self, message: Callable[[str], None], /) -> None:
        """Do nothing: the engine has no events."""

    def take_lines(self) -> list[str]:
        """Return no lines."""
        return []

    def take_metrics(self) -> list[Metric]:
        """Return no metrics."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


@runtime_checkable
class AskingEngine(Engine, Protocol):
    """An engine outside of this process. One rank of each replica sends it requests, also while the policy trains."""

    @property
    def asks(self) -> bool:
        """Whether this rank, the replica's first, sends the requests of its replica."""

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the group of a prompt, with a completion for each seed. Not collective, and safe to call from several
        threads, also while `update_weights` or `generate` runs. Raises EngineError if no server returns a completion.
        """

    def of_stage(self, group: Group, stage: int) -> Group:
        """Return a group of `request_group`, which has all layers' routes, with only those of a pipeline stage."""


@runtime_checkable
class StoppableEngine(Engine, Protocol):
    """An engine whose waits can be ended from another thread."""

    def end_waits_when(self, is_asked: Callable[[], bool]) -> None:
        """End waits soon after `is_asked` has become true: they raise StoppedError on all ranks."""


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine that takes turns with the trainer: one of them has the memory of the GPUs."""

    def wake(self) -> None:
        """Take the memory, and the weights of the last `update_weights`, before requests."""

    def rest(self) -> None:
        """Give the memory back, unless that is done."""


def end_waits_when(engine: Engine, is_asked: Callable[[], bool]) -> None:
    """End waits of an engine for other processes soon after `is_asked` has become true (StoppableEngine)."""
    if isinstance(engine, StoppableEngine):
        engine.end_waits_when(is_asked)


def wake(engine: Engine) -> None:
    """Collective over the world: let an engine take memory that it shares with the trainer, before it generates."""
    if isinstance(engine, SharingEngine):
        engine.wake()


def rest(engine: Engine) -> None:
    """Collective over the world: give back the memory that is shared with the trainer, with no request in progress."""
    if isinstance(engine, SharingEngine):
        engine.rest()


def asking_or_none(engine: Engine) -> AskingEngine | None:
    """Return the engine if it is outside of this process."""
    return engine if isinstance(engine, AskingEngine) else None


def asking(engine: Engine) -> AskingEngine:
    """Return the engine as an `AskingEngine`. Raises ConfigError if it cannot generate while the policy trains."""
    if not isinstance(engine, AskingEngine):
        raise ConfigError(
            f"rl.rollout.max_staleness is above 0, and the rollout engine, {type(engine).__name__}, has no `asks`, "
            "`request_group` and `of_stage` (rl.engines.base.AskingEngine) to generate while the policy trains. "
            "Give it these, or set max_staleness=0."
        )
    return engine


def check_request(
    prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]], capabilities: Capabilities
) -> None:
    """Raise EngineError if an engine with these capabilities cannot serve the request."""
    assert len(prompts) == len(seeds_PG), (len(prompts), len(seeds_PG))
    if sampling.with_routes and not capabilities.routes:
        raise EngineError("routes were asked for, and this model or engine has none. Ask for completions only.")
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


Decode = Callable[[Sequence[int]], str]
MakeEngine = Callable[[RlRunConfig, Sequence[nn.Module], Mesh, Decode], Engine]
"""Function that makes an engine on the training modules `chunks`; the last argument converts token ids to text."""
ENGINES = {
    "native": "mcore_rl.rl.engines.native.engine:native_engine",
    "vllm": "mcore_rl.rl.engines.served:served_engine",
    "sglang": "mcore_rl.rl.engines.served:served_engine",
}
"""The MakeEngine of each built-in engine; its module is imported only for a config that names it."""


def make_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Collective over the world: create the engine of `rl.engine.kind`; `decode` converts token ids to text. Raises
    ConfigError if a user-defined engine lacks members of `Engine`.
    """
    kind = config.rl.engine.kind
    make: MakeEngine = load_extension("rl.engine.kind", ENGINES.get(kind, kind))
    engine = make(config, chunks, mesh, decode)
    if missing := [name for name in vars(Engine) if not name.startswith("_") and not hasattr(engine, name)]:
        quiet = [name for name in missing if hasattr(QuietEngine, name)]
        raise ConfigError(
            f"rl.engine.kind={kind} makes {type(engine).__name__}, which has no {', '.join(missing)} "
            "(rl.engines.base.Engine). Add them"
            + (f"; rl.engines.base.QuietEngine as a base has {', '.join(quiet)}." if quiet else ".")
        )
    return engine
