"""Sessions of agents as rollouts: agents run in processes and ask the endpoint, behind which the engine answers."""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Self

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl_run import RlConfig
from mcore_rl.data.chat import Chat
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import ConfigError, DataError, EngineError, McoreRlError
from mcore_rl.megatron.agree import from_first_of_model, on_every_rank, world_max
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.agents.answers import (
    FORMATS,
    Body,
    answer_of,
    choice_of,
    cut_at_stop,
    format_of,
    message_of,
    read_body,
)
from mcore_rl.rl.agents.anthropic import chat_body, message_answer
from mcore_rl.rl.agents.endpoint import Endpoint, RefusedError
from mcore_rl.rl.agents.run import Run, run_agent
from mcore_rl.rl.agents.session import Call, Session, common_length, identity
from mcore_rl.rl.engines.base import Engine, Sampling, asking_or_none, sampling_of
from mcore_rl.rl.environments.conversations import failed_trials
from mcore_rl.rl.rewards.score import NO_ANSWER, FailedPart
from mcore_rl.rl.rollouts.transcript import turn_text
from mcore_rl.rl.types import Completion, Group, Prompt, single_version
from mcore_rl.rl.workers import FailedScore, WorkerPool

BEAT_S = 0.5
"""Seconds after which ranks that wait for requests tell each other that they still wait."""
KINDS = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion", "/v1/messages": "message"}


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    """A request that waits for a round of an engine in the training processes."""

    prompt: Prompt
    sampling: Sampling
    seeds: list[int]
    session: Session
    future: "Future[tuple[Completion, ...]]"


class AgentSessions:
    """Runs agents as `Conversations` holds conversations. A context, in which the endpoint listens."""

    def __init__(
        self,
        rl: RlConfig,
        engine: Engine,
        chat: Chat,
        tokenizer: Tokenizer,
        mesh: Mesh | None,
        ends: Iterable[int],
        *,
        serves: bool,
    ) -> None:
        """Prepare the agent of `rl.agent`; the tokens `ends` end completions. Without a mesh, only `hold_group` may be
        called. `serves`: whether this rank, the first of its replica, runs the agents and the endpoint.
        """
        self._rl, self._engine, self._chat, self._tokenizer, self._mesh = rl, engine, chat, tokenizer, mesh
        self._document_ends = frozenset(ends) - frozenset(rl.rollout.stop_tokens)
        self._serves, chosen, shown = serves, rl.agent.tool_format, format_of(chat)
        self._tool_format = shown if chosen == "auto" else chosen
        self._limit = rl.prompts.max_tokens + rl.agent.max_tokens
        self._multiple = 1 if mesh is None else mesh.config.zigzag
        if self._multiple > 1:
            self._limit -= self._multiple  # for a prompt of its own, where sessions begin with different tokens
        self.environment_s = 0.0
        """Seconds of the last `hold` in which the engine waited for agents."""
        self._changed = threading.Condition()
        """Guards the four fields below."""
        self._waiting: list[_Request] = []
        self._num_running = 0
        self._error: McoreRlError | None = None
        self._jobs: SimpleQueue[tuple[Session, Sampling, Future[Session]] | None] = SimpleQueue()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        agent = self._rl.agent
        if not self._serves:
            return self
        if agent.function is not None:
            load_extension("rl.agent.function", agent.function)  # once, before processes are forked
        port = agent.port + self._mesh.dp_cp.rank if agent.port and self._mesh is not None else 0
        try:
            self._endpoint = self._stack.enter_context(Endpoint(agent.host, port, agent.model))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the endpoint of rl.agent cannot listen at {agent.host}, port {port}: {error}. Set rl.agent.host and "
                "port to others, or port=0 for any free one."
            ) from error
        self._pool = self._stack.enter_context(
            WorkerPool(
                partial(run_agent, agent, self._endpoint.close_in_child),
                workers=agent.sessions,
                timeout_s=agent.timeout_s,
                max_memory_gib=agent.max_memory_gib,
            )
        )
        # Daemons: a process that ends after an error does not wait for agents.
        threading.Thread(target=self._endpoint.serve_forever, name="agent-endpoint", daemon=True).start()
        self._stack.callback(self._endpoint.shutdown)
        for n in range(agent.sessions):
            threading.Thread(target=self._work, name=f"agent-{n}", daemon=True).start()
            self._stack.callback(self._jobs.put, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._fail(EngineError("the endpoint has been closed"))
        self._stack.close()

    def hold(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Collective over the world: run a session for each seed of each of this replica's prompts. Returns a group for
        each prompt, in order. Raises EngineError on all ranks if the engine has failed.
        """
        assert self._mesh is not None
        self.environment_s, begin_s = 0.0, time.perf_counter()
        asking = asking_or_none(self._engine)
        futures_PG = self._start(range(len(prompts)), prompts, sampling, seeds_PG) if self._serves else []
        if asking is None:
            self._serve_rounds(sampling, self._mesh)
            self.environment_s += time.perf_counter() - begin_s
        found = on_every_rank(lambda: self._groups(prompts, futures_PG) if self._serves else [])
        if asking is None:
            return from_first_of_model(found, self._mesh)
        return from_first_of_model(
            found, self._mesh, lambda groups, stage: [asking.of_stage(group, stage) for group in groups]
        )

    def hold_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Run the sessions of prompt `index`, on the rank that asks servers. Not collective; safe in several threads,
        also while the policy trains or its weights are pushed. Raises EngineError if no server returns an answer.
        """
        return self._groups([prompt], self._start([index], [prompt], sampling, [seeds_G]))[0]

    def _serve_rounds(self, sampling: Sampling, mesh: Mesh) -> None:
        """Collective over the world: answer requests with the engine of the training processes until all agents have
        ended. Requests that come while the engine computes wait for its next round.
        """
        while True:
            taken = self._take() if self._serves else []
            is_running = self._serves and (self._num_running > 0 or bool(taken))
            own = [(request.prompt, request.sampling, request.seeds) for request in taken]
            asked = from_first_of_model(own, mesh)
            if not world_max(int(is_running)):
                return
            by_rules: dict[Sampling, list[int]] = {}
            for n, (_, rules, _) in enumerate(asked):
                by_rules.setdefault(rules, []).append(n)
            batches = [*by_rules.items()]
            # Replicas that share experts make the same number of calls.
            for n in range(world_max(len(batches))):
                rules, places = batches[n] if n < len(batches) else (sampling, [])
                start_s = time.perf_counter()
                try:
                    groups = self._engine.generate(
                        [asked[place][0] for place in places], rules, [asked[place][2] for place in places]
                    )
                except McoreRlError as error:
                    self._fail(error, taken)
                    raise
                self.environment_s -= time.perf_counter() - start_s
                for place, group in zip(places, groups, strict=True):
                    if taken:
                        taken[place].future.set_result(group.completions)

    def _take(self) -> list[_Request]:
        """Wait for requests: until all running agents wait for one, or the window after the first has passed."""

        def is_full() -> bool:
            waiting = {request.session.key for request in self._waiting}
            return len(waiting) >= min(self._num_running, self._rl.agent.sessions)

        with self._changed:
            if self._changed.wait_for(lambda: self._waiting or not self._num_running, BEAT_S):
                self._changed.wait_for(is_full, self._rl.agent.window_s)
            # In an order that does not depend on which thread came first.
            taken, self._waiting = sorted(self._waiting, key=lambda request: request.seeds), []
        return taken

    def _fail(self, error: McoreRlError, taken: Sequence[_Request] = ()) -> None:
        """Refuse all requests from now on: the engine has failed, or the run ends."""
        with self._changed:
            self._error = self._error or error
            waiting, self._waiting = [*taken, *self._waiting], []
        for request in waiting:
            if not request.future.done():
                request.future.set_exception(error)

    def _start(
        self, indices: Sequence[int], prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> "list[list[Future[Session]]]":
        futures_PG: list[list[Future[Session]]] = [[Future() for _ in seeds] for seeds in seeds_PG]
        with self._changed:
            self._num_running += sum(map(len, futures_PG))
        for index, prompt, seeds, futures in zip(indices, prompts, seeds_PG, futures_PG, strict=True):
            for seed, future in zip(seeds, futures, strict=True):
                session = Session(
                    index=index,
                    prompt=prompt,
                    seed=seed,
                    key=f"sk-{secrets.token_hex(16)}",
                    max_tokens=self._limit,
                    multiple=self._multiple,
                )
                self._jobs.put((session, sampling, future))
        return futures_PG

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            session, sampling, future = job
            try:
                self._run(session, sampling)
            except McoreRlError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)  # or the main thread waits for ever
                raise
            else:
                future.set_result(session)
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify_all()

    def _run(self, session: Session, sampling: Sampling) -> None:
        agent = self._rl.agent
        self._endpoint.sessions[session.key] = partial(self._answer, session, sampling)
        run = Run(
            problem=session.prompt.problem,
            arguments=agent.arguments,
            base_url=self._endpoint.url,
            api_key=session.key,
            model=agent.model,
            seed=session.seed,
        )
        [outcome] = self._pool.run([run])
        with session.lock:
            session.is_closed = True
        del self._endpoint.sessions[session.key]
        if outcome is None and self._rl.reward.environment_weight:
            outcome = FailedScore("bad_reply", "the agent returned no reward")
        if isinstance(outcome, FailedScore):
            session.failure = outcome
        elif session.branches and agent.branches == "fail":
            reason = f'a request began another segment (rl.agent.branches="fail"): {session.branches[0]}'
            session.failure = FailedScore("template", reason)
        elif not session.calls:
            session.failure = FailedScore("bad_reply", "the agent asked nothing")
        else:
            session.reward = outcome or 0.0
        if not session.calls:
            # A sample has a token of the policy, which has routes and is not trained on.
            rules = replace(sampling, max_new_tokens=1)
            [only] = self._ask(session, session.prompt, rules, [session.seed])
            session.record(Call(prompt_T=session.prompt.tokens_T, completion=only, text=only.text))

    def _groups(self, prompts: Sequence[Prompt], futures_PG: "Sequence[Sequence[Future[Session]]]") -> list[Group]:
        groups = []
        for prompt, futures in zip(prompts, futures_PG, strict=True):
            sessions = [future.result() for future in futures]
            if self._error is not None:
                raise self._error
            common = common_length(sessions)
            # Without a common token, a prompt that is read by nothing.
            tokens_T = sessions[0].paths()[0][0].prompt_T[:common] or (self._tokenizer.eod_id,) * 2
            completions = tuple(
                session.completion(common, "failed" if session.failure is not None else session.refused or "done")
                for session in sessions
            )
            groups.append(Group(prompt=Prompt(problem=prompt.problem, tokens_T=tokens_T), completions=completions))
        return groups

    def _ask(self, session: Session, prompt: Prompt, sampling: Sampling, seeds: list[int]) -> tuple[Completion, ...]:
        """Return completions of the engine. Raises the engine's error, which ends the run."""
        request, asking = _Request(prompt, sampling, seeds, session, Future()), asking_or_none(self._engine)
        with self._changed:
            if self._error is not None:
                raise self._error
            if asking is None:
                self._waiting.append(request)
                self._changed.notify_all()
        if asking is None:
            return request.future.result()
        return asking.request_group(session.index, prompt, sampling, seeds).completions

    def _answer(
        self,
        session: Session,
        sampling: Sampling,
        path: str,
        body: Mapping[str, Any],
        again: bool,
        is_there: Callable[[], bool],
    ) -> Mapping[str, Any]:
        """Answer a request of a session, and record it if the client is still there. Raises RefusedError."""
        kind = KINDS.get(path)
        if kind is None:
            raise RefusedError(f"no such path: {path}", status=404)
        digest = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
        with session.lock:
            # A client that lost the answer asks again: the first answer is the one that counts.
            made = session.answered.get(digest) if again else None
            is_first = made is None
            if made is None:
                made = session.answered[digest] = Future()
        if is_first:
            try:
                made.set_result(self._made(session, sampling, kind, body, id(made)))
            except RefusedError as error:
                made.set_exception(error)
            except DataError as error:
                made.set_exception(RefusedError(str(error)))
            except McoreRlError as error:
                self._fail(error)
                made.set_exception(RefusedError(str(error), status=503, code="engine_error"))
            except (TypeError, KeyError, ValueError, AttributeError, LookupError) as error:
                made.set_exception(RefusedError(f"the body has another form than the API's: {error!r}"))
            except BaseException as error:
                made.set_exception(error)  # or a client that asks again waits for ever
                raise
            finally:
                with session.lock:
                    session.open.pop(id(made), None)
        calls, answer = made.result()
        with session.lock:
            if session.is_closed:
                raise RefusedError("the session has ended", status=403)
            if is_there() and not any(call is calls[0] for call in session.calls):
                session.record(*calls)
        return answer

    def _made(
        self, session: Session, sampling: Sampling, kind: str, fields: Mapping[str, Any], number: int
    ) -> tuple[list[Call], Mapping[str, Any]]:
        agent, chat = self._rl.agent, self._chat
        is_message = kind == "message"
        body = read_body(
            chat_body(fields) if is_message else fields, agent.model, sampling.cut, refuses=agent.sampling == "refuse"
        )
        tools, count = tuple(body.tools or ()), body.n or 1
        with session.lock:
            if session.is_closed:
                raise RefusedError("the session has ended", status=403)
            num_calls = len(session.calls) + sum(calls for _, calls in session.open.values())
            if num_calls + count > agent.max_calls:
                session.refused = "turns"
                raise RefusedError(f"the session has made rl.agent.max_calls={agent.max_calls} calls", status=403)
            prompt_T, raw, keys = self._prompt(session, kind, body, tools)
            room = session.room(prompt_T, count)
            room = min(room, self._engine.capabilities.max_tokens - len(prompt_T))
            asked = body.max_completion_tokens or body.max_tokens or sampling.max_new_tokens
            num_new = min(asked, sampling.max_new_tokens, room)
            if num_new < 1:
                session.refused = "context"
                raise RefusedError(
                    f"maximum context length: {len(prompt_T)} tokens leave no room for an answer in "
                    f"rl.prompts.max_tokens + rl.agent.max_tokens={self._limit} tokens of the session",
                    code="context_length_exceeded",
                )
            session.refused = None
            session.open[number] = ((len(prompt_T) + num_new + self._multiple) * count, count)
            seeds = session.next_seeds(prompt_T, count)
        rules = replace(sampling, max_new_tokens=num_new, stop_strings=(*sampling.stop_strings, *body.stops))
        prompt = Prompt(problem=session.prompt.problem, tokens_T=prompt_T)
        completions = self._ask(session, prompt, rules, seeds)
        calls, choices = [], []
        for n, completion in enumerate(completions):
            text = turn_text(completion, self._rl.rollout.stop_tokens, chat, self._engine.decode)
            shown = cut_at_stop(text, body.stops)
            message = message_of(shown, tools, self._tool_format) if raw else {}
            calls.append(
                Call(
                    prompt_T=prompt_T,
                    completion=completion,
                    text=text,
                    messages=(*body.messages, message) if raw else (),
                    raw=(*raw, {"role": "assistant", "content": text}) if raw else (),
                    keys=(*keys, identity(message)) if raw else (),
                )
            )
            choices.append(choice_of(n, completion, text, message, body, chat))
        num_sampled = sum(len(completion.tokens_T) for completion in completions)
        answer = answer_of("chat.completion" if is_message else kind, body, choices, prompt_T, num_sampled)
        return calls, message_answer(answer) if is_message else answer

    def _prompt(
        self, session: Session, kind: str, body: Body, tools: tuple[Mapping[str, Any], ...]
    ) -> tuple[tuple[int, ...], tuple[Mapping[str, Any], ...], tuple[str, ...]]:
        """Return the tokens before the answer, the messages for the template, and keys of the request; the last two are
        empty for raw completions.
        """
        if kind != "text_completion":
            if not body.messages or body.messages[-1]["role"] == "assistant":
                raise RefusedError("messages must end with a turn that the assistant answers")
            if tools and self._tool_format is None:
                raise RefusedError(
                    f"tools: the chat template writes calls in none of the known formats ({', '.join(FORMATS)}). Name "
                    "one (rl.agent.tool_format), or describe the tools in a message and read calls from the content"
                )
            return session.chat_prompt(self._chat, body.messages, tools, self._document_ends)
        if isinstance(body.prompt, list):
            if not all(0 <= token < self._tokenizer.vocab_size for token in body.prompt):
                raise RefusedError(f"prompt: ids are 0 to {self._tokenizer.vocab_size - 1}")
            prompt_T = tuple(body.prompt)
        else:
            prompt_T = session.text_prompt(body.prompt, self._chat.decode, self._tokenizer.encode)
        if not prompt_T:
            raise RefusedError("prompt: it has no tokens")
        return prompt_T, (), ()


class _Trial(AgentSessions):
    """Sessions without an engine, of which each request is answered with the reference answer of the problem."""

    def _ask(self, session: Session, prompt: Prompt, sampling: Sampling, seeds: list[int]) -> tuple[Completion, ...]:
        said = self._tokenizer.encode(prompt.problem.answer or NO_ANSWER)[: sampling.max_new_tokens - 1]
        one = Completion(
            text=self._tokenizer.decode(said),
            tokens_T=(*said, next(iter([*self._chat.turn_end_ids, *sampling.stop_tokens]))),
            logprobs_T=(0.0,) * (len(said) + 1),
            versions=single_version(0, len(said) + 1),
            finish="stop",
        )
        return (one,) * len(seeds)


def try_agent(
    rl: RlConfig, prompts: Sequence[Prompt], chat: Chat, tokenizer: Tokenizer, ends: Collection[int]
) -> tuple[FailedPart, ...]:
    """Run the agent on each problem before a run, to find one that always fails. Returns the failures. Raises
    ConfigError if the agent cannot be imported, and TrainingError if it failed for every prompt, unless
    rl.reward.max_failed_fraction=1.
    """
    few = rl.agent.model_copy(update={"sessions": min(rl.agent.sessions, len(prompts))})
    rules = sampling_of(rl.rollout, ends, vocab_size=tokenizer.vocab_size, with_routes=False)
    engine: Any = SimpleNamespace(decode=tokenizer.decode, capabilities=SimpleNamespace(max_tokens=1 << 30))
    with _Trial(rl.model_copy(update={"agent": few}), engine, chat, tokenizer, None, ends, serves=True) as trial:
        futures_PG = trial._start(range(len(prompts)), prompts, rules, [[n] for n in range(len(prompts))])
        sessions = [future.result() for [future] in futures_PG]
    return failed_trials(rl, prompts, [session.failure for session in sessions])
