"""A session: the calls of one run of an agent, with their exact tokens, and the sample that they become."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.data.chat import Chat, Conversation, TemplateChat
from mcore_rl.data.packing import padded
from mcore_rl.errors import DataError
from mcore_rl.rl.environments.interface import Message
from mcore_rl.rl.rollouts.transcript import Transcript, completion_of
from mcore_rl.rl.types import Completion, EpisodeEnd, Prompt
from mcore_rl.rl.workers import FailedScore


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One answer of the policy, with the tokens before it."""

    prompt_T: tuple[int, ...]
    completion: Completion
    text: str
    messages: tuple[Message, ...] = ()
    """Messages of the request and the answer as the agent saw them; empty for raw completions."""
    raw: tuple[Message, ...] = ()
    """The same as the template is given them: turns of the policy are the text that it wrote."""
    keys: tuple[str, ...] = ()
    """The tools and messages, of which later requests are compared with it, by `identity`."""

    @property
    def tokens_T(self) -> tuple[int, ...]:
        """All tokens up to the end of the answer."""
        return self.prompt_T + self.completion.tokens_T

    @property
    def num_tokens(self) -> int:
        """Number of all tokens up to the end of the answer."""
        return len(self.prompt_T) + len(self.completion.tokens_T)

    def begins(self, tokens_T: tuple[int, ...]) -> bool:
        """Return whether tokens begin with all of the call's. The answer comes first, as it mostly settles it."""
        start, answer_T = len(self.prompt_T), self.completion.tokens_T
        return tokens_T[start : start + len(answer_T)] == answer_T and tokens_T[:start] == self.prompt_T


def identity(message: Message) -> str:
    """Return what two messages have in common if they are the same to the model: no ids, reasoning or nulls, and no
    outer white space of the assistant's text, all of which agents rewrite.
    """
    content, role = text_of(message.get("content")), message["role"]
    calls = [[call["function"]["name"], arguments_of(call)] for call in message.get("tool_calls") or ()]
    return json.dumps([role, content.strip() if role == "assistant" else content, calls], sort_keys=True)


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts. Raises DataError for other parts."""
    if isinstance(content, list):
        if other := [part.get("type") for part in content if part.get("type") != "text"]:
            raise DataError(f"messages: a part of type {other[0]!r}; only texts are read by the policy")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise DataError(f"messages: the content {content!r:.60} is no text")
    return content or ""


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call: OpenAI's are JSON in a string, templates want the object."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def for_template(message: Message) -> dict[str, Any]:
    """Return a message of a request as chat templates expect it."""
    role = "system" if message["role"] == "developer" else message["role"]
    found = {**message, "role": role, "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call)}}
            for call in message["tool_calls"]
        ]
    return found


@dataclass(eq=False, kw_only=True, slots=True)
class Session:
    """The calls of one run of an agent. The threads that answer its requests share it, under its lock."""

    index: int
    """Index of the prompt, by which a served engine chooses a server."""
    prompt: Prompt
    seed: int
    key: str
    max_tokens: int
    """Maximum number of tokens of the sample."""
    multiple: int
    """Number of which the padded length of each segment is a multiple."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[Call] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Index of the call that each call continues; -1: it begins a segment."""
    texts: list[str] = field(default_factory=list)
    """Texts of the first calls' tokens, which requests by text are compared with."""
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens, and number, of the calls that each request in progress may become."""
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """How often each prompt was asked."""
    branches: list[str] = field(default_factory=list)
    """Reasons why requests extended no earlier call."""
    refused: EpisodeEnd | None = None
    """Limit that refused the newest request."""
    answered: "dict[str, Future[tuple[list[Call], Mapping[str, Any]]]]" = field(default_factory=dict)
    """Answers by the digest of the request, for a client that asks again after a broken connection."""
    is_closed: bool = False
    reward: float = 0.0
    failure: FailedScore | None = None

    def chat_prompt(
        self,
        chat: Chat,
        messages: Sequence[Message],
        tools: tuple[Mapping[str, Any], ...],
        document_ends: frozenset[int],
    ) -> tuple[tuple[int, ...], tuple[Message, ...], tuple[str, ...]]:
        """Return the tokens before the answer, messages for the template, and keys of the request (`Call.keys`). A
        request that continues a recorded call extends its tokens; otherwise the template renders the messages as sent,
        as a server in production would.
        """
        keys = (json.dumps(tools, sort_keys=True), *map(identity, messages))
        raw = tuple(map(for_template, messages))
        reason = "its messages do not begin with those of an earlier call"
        for call in sorted(self.calls, key=lambda call: -len(call.keys)):
            if not call.keys or keys[: len(call.keys)] != call.keys or len(keys) == len(call.keys):
                continue
            last = call.completion.tokens_T[-1]
            if last in document_ends and last not in chat.turn_end_ids:
                reason = "the turn before ended the document"
                break
            before, is_closed = Conversation(messages=call.raw[:-1], tools=tools), last in chat.turn_end_ids
            answer, replies = call.raw[-1], raw[len(call.raw) :]
            try:
                rest = chat.reply(before, answer["content"], replies, is_closed=is_closed)
            except DataError as error:
                reason = str(error)
                if not isinstance(chat, TemplateChat):
                    break
                try:
                    answer = for_template(call.messages[-1])
                    rest = chat.reply_parsed(before, answer, replies, is_closed=is_closed)
                except DataError:
                    break
            return (*call.tokens_T, *rest), (*call.raw[:-1], answer, *replies), keys
        if self.calls:
            self.branches.append(reason)
        return tuple(chat.prompt(Conversation(messages=raw, tools=tools))), raw, keys

    def text_prompt(
        self, prompt: str, decode: Callable[[Sequence[int]], str], encode: Callable[[str], Sequence[int]]
    ) -> tuple[int, ...]:
        """Return the tokens of a raw prompt, which extends a recorded call if its text begins with that call's."""
        self.texts += [decode(call.tokens_T) for call in self.calls[len(self.texts) :]]
        for text, call in sorted(zip(self.texts, self.calls, strict=True), key=lambda pair: -len(pair[0])):
            if prompt.startswith(text):
                return (*call.tokens_T, *encode(prompt[len(text) :]))
        if self.calls:
            self.branches.append("its prompt does not begin with the text of an earlier call")
        return tuple(encode(prompt))

    def next_seeds(self, prompt_T: tuple[int, ...], count: int) -> list[int]:
        """Return seeds that depend on the session and the tokens, and not on which of two requests came first."""
        first = self.asked[prompt_T]
        self.asked[prompt_T] += count
        text = repr((self.seed, prompt_T))[:-1]
        digests = [
            hashlib.blake2b(f"{text}, {n})".encode(), digest_size=8).digest() for n in range(first, first + count)
        ]
        return [int.from_bytes(digest, "little") >> 1 for digest in digests]  # a seed is a positive int64

    def room(self, prompt_T: tuple[int, ...], count: int) -> int:
        """Return how many tokens each of `count` answers to these tokens may have."""
        others = [call for call in map(self.calls.__getitem__, self._leaves()) if not call.begins(prompt_T)]
        used = sum(padded(call.num_tokens, self.multiple) for call in others)
        used += sum(tokens for tokens, _ in self.open.values())
        return (self.max_tokens - used) // count // self.multiple * self.multiple - len(prompt_T)

    def record(self, *calls: Call) -> None:
        """Add calls. Each continues the earlier call with the most tokens that its prompt begins with. A prompt may
        begin so by chance, and with tokens of newer weights than its answer: these it does not continue.
        """
        for call in calls:
            longest_first = sorted(range(len(self.calls)), key=lambda n: -self.calls[n].num_tokens)
            begun = (
                n
                for n in longest_first
                if self.calls[n].completion.versions[-1].version <= call.completion.policy_version
                and self.calls[n].begins(call.prompt_T)
            )
            self.parents.append(next(begun, -1))
            self.calls.append(call)

    def _leaves(self) -> list[int]:
        """Return the calls that no other call continues, the newest last."""
        return sorted({*range(len(self.calls))} - {*self.parents})

    def paths(self) -> list[list[Call]]:
        """Return the calls of each branch, in order; the newest call ends the last branch. Branches may share calls."""
        found = []
        for leaf in self._leaves():
            numbers = [leaf]
            while (parent := self.parents[numbers[-1]]) >= 0:
                numbers.append(parent)
            found.append([self.calls[n] for n in reversed(numbers)])
        return found

    def completion(self, common: int, end: EpisodeEnd) -> Completion:
        """Return the session as a completion after its first `common` tokens, with a segment for each branch; with
        `common` = 0 it begins with a new segment. A call of several branches is trained on in the last of them, and
        context in the others.
        """
        paths = self.paths()
        trained = {id(call): n for n, path in enumerate(paths) for call in path}
        parts = [Transcript() for _ in paths]
        for n, (path, part) in enumerate(zip(paths, parts, strict=True)):
            for call in path:
                part.insert(call.prompt_T[(0 if n else common) + len(part.tokens_T) :])
                if trained[id(call)] == n:
                    part.add(call.completion)
                else:
                    part.insert(call.completion.tokens_T)
        newest = self.calls[-1]
        return completion_of(
            parts,
            [0.0] * (len(self.calls) - 1) + [self.reward],
            text=newest.text,
            messages=newest.messages,
            end=end,
            failure=self.failure,
            follows_prompt=common > 0,
        )


def common_length(sessions: Sequence[Session]) -> int:
    """Return the number of tokens with which the first segments of all sessions begin: the prompt of their group."""
    prompts = [session.paths()[0][0].prompt_T for session in sessions]
    shortest = min(map(len, prompts))
    return next((n for n in range(shortest) if len({prompt[n] for prompt in prompts}) > 1), shortest)
