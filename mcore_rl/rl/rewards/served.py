"""Rewards from servers: a reward server scores completions, or a language model judges them."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mcore_rl.config.extension import JUDGE_PART, SERVED_PARTS, server_url
from mcore_rl.config.rl.rollout import JudgeConfig, RewardConfig, RewardServerConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.engines.server_api import HttpClient, ServerError
from mcore_rl.rl.rewards.interface import Outcome, RewardInput, outcome_of
from mcore_rl.rl.rewards.rules import MINUS_SIGNS, rating
from mcore_rl.rl.workers import MAX_TEXT, FailedScore, cut
from mcore_rl.workers.launcher import environment_variable

Parsed = TypeVar("Parsed")
COMPLETIONS_PATH = "/chat/completions"
"""Path of the chat endpoint of an OpenAI-compatible server, below the URL that ends in /v1."""


def served_parts(config: RewardConfig) -> dict[str, "Judge | RewardServer"]:
    """Return the parts that servers score, by name; no request is sent yet. Raises ConfigError if the environment
    variable of an API key is not set, or a template cannot be read.
    """
    parts: dict[str, Judge | RewardServer] = {}
    for name in config.parts:
        if name.startswith(SERVED_PARTS):
            is_judge = name.startswith(JUDGE_PART)
            url = config.judge.url or "" if is_judge else server_url(name)
            client = RetryingClient(url, config.server)
            parts[name] = Judge(name, config.judge, client) if is_judge else RewardServer(client, config.server)
    return parts


class RetryingClient:
    """Sends concurrent requests to a server, and retries requests that fail."""

    def __init__(self, url: str, config: RewardServerConfig) -> None:
        key = environment_variable(config.api_key_env) if config.api_key_env else None
        if config.api_key_env and not key:
            raise ConfigError(
                f'rl.reward.server.api_key_env="{config.api_key_env}", and this variable is not set where the run '
                "starts. Export it there, or clear the field."
            )
        self._client = HttpClient(url, api_key=key, ca_file=config.ca_file)
        self._root = "" if urlsplit(url).path.strip("/") else "/"
        self._config = config

    def answers(
        self, bodies: Sequence[Mapping[str, Any]], read: Callable[[Any, int], Parsed], path: str | None = None
    ) -> Iterator[Parsed | FailedScore]:
        """Yield, in order, the result of `read(answer, index)` for each body, or its failure; a request also fails if
        `read` raises a ServerError. After a body that failed in all its tries, as with a server that is down, the rest
        are tried once.
        """
        is_down = False

        def ask(index: int) -> Parsed | FailedScore:
            nonlocal is_down
            wait_s = self._config.retry_s
            for tries_left in reversed(range(1 + self._config.retries)):
                try:
                    answer = self._client.post(
                        self._root if path is None else path, bodies[index], timeout_s=self._config.timeout_s
                    )
                    return read(answer, index)
                except ServerError as error:
                    if error.is_refusal or is_down or not tries_left:
                        is_down = is_down or not error.is_refusal
                        return FailedScore("raised", cut(str(error), MAX_TEXT), error="ServerError")
                except (TypeError, ValueError) as error:  # a prompt's field cannot be encoded as JSON
                    return FailedScore("raised", cut(f"not sent: {error}", MAX_TEXT), error=type(error).__name__)
                time.sleep(wait_s)
                wait_s *= 2
            raise AssertionError("the last try returns")

        with ThreadPoolExecutor(self._config.concurrency) as pool:
            yield from pool.map(ask, range(len(bodies)))


class RewardServer:
    """The part `http:URL`: it posts batches as {"samples": [...]} and expects {"scores": [...]}."""

    def __init__(self, client: RetryingClient, config: RewardServerConfig) -> None:
        self._client = client
        self._batch_size = config.batch_size

    def outcomes(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """Return the outcome of each completion. If a batch has no answer, all its scores have failed."""
        batches = [inputs[begin : begin + self._batch_size] for begin in range(0, len(inputs), self._batch_size)]
        bodies = [{"samples": [asdict(scored) for scored in batch]} for batch in batches]

        def read(answer: Any, index: int) -> list[Outcome]:
            scores = answer.get("scores") if isinstance(answer, Mapping) else None
            if not isinstance(scores, list) or len(scores) != len(batches[index]):
                shown = f"{len(scores)} scores" if isinstance(scores, list) else cut(repr(answer), 200)
                raise ServerError(f'the answer to {len(batches[index])} samples is {shown}, wanted {{"scores": [...]}}')
            return [_outcome(score, scored) for score, scored in zip(scores, batches[index], strict=True)]

        outcomes: list[Outcome] = []
        for batch, found in zip(batches, self._client.answers(bodies, read), strict=True):
            outcomes += [found] * len(batch) if isinstance(found, FailedScore) else found
        return outcomes


def _outcome(score: Any, scored: RewardInput) -> Outcome:
    """Convert a score from a server to an outcome. JSON has no tuples, so [number, text] is read as a tuple."""
    is_reasoned = isinstance(score, list) and len(score) == 2 and isinstance(score[1], str | None)
    try:
        return outcome_of(tuple(score) if is_reasoned else score, len(scored.completion))
    except (TypeError, ValueError) as error:
        return FailedScore("raised", f"the server's score: {cut(str(error), MAX_TEXT)}", error="ServerError")


class Judge:
    """The part `judge:FILE`: a language model answers the filled template, and its answer contains the score."""

    def __init__(self, part: str, config: JudgeConfig, client: RetryingClient) -> None:
        """Read the template. Raises ConfigError if it cannot be read or parsed."""
        self._config, self._client = config, client
        path = Path(part.removeprefix(JUDGE_PART))
        # The template is the user's text and is filled with a model's text: neither may execute Python.
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            self._template = environment.from_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ConfigError(f'rl.reward.parts="{part}": the template cannot be read: {error}. Correct it.') from error
        self._pattern = re.compile(config.score_pattern, re.DOTALL)

    def outcomes(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """Return the outcome of each completion, with the judge's answer as the reason."""
        config = self._config
        questions = [self._question(scored) for scored in inputs]
        asked = [question for question in questions if isinstance(question, str)]
        bodies = [
            {
                "model": config.model,
                "messages": [{"role": "user", "content": question}],
                "temperature": config.temperature,
                "max_tokens": config.max_tokens,
            }
            for question in asked
        ]
        found = iter(self._client.answers(bodies, self._read, COMPLETIONS_PATH))
        return [question if isinstance(question, FailedScore) else next(found) for question in questions]

    def _question(self, scored: RewardInput) -> str | FailedScore:
        try:
            return self._template.render(asdict(scored))
        except TemplateError as error:
            return FailedScore("raised", f"the judge's template: {error}", error=type(error).__name__)

    def _read(self, answer: Any, index: int) -> Outcome:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"no chat completion: {cut(repr(answer), 200)}") from None
        found = list(self._pattern.finditer((text or "").translate(MINUS_SIGNS)))
        number = rating(text, *found[-1].span(1)) if found else None
        if number is None:
            missing = "no score" if not found else f"no single number for the score {found[-1][0]!r}"
            reason = f"{missing} in the judge's answer: {cut(repr(text), 500)}"
            return FailedScore("raised", reason, error="NoScore")
        return outcome_of((float(number) / self._config.scale, cut(text, MAX_TEXT)), 0)
