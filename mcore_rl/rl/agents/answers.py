"""From the body of a request to sampling, and from the policy's text to a message with reasoning and tool calls."""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NotRequired

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from typing_extensions import TypedDict

from mcore_rl.data.chat import Chat, Conversation
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rl.agents.endpoint import RefusedError
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
"""Fields that change the distribution, or that no engine can give, with the values at which they do not."""
IGNORED = (
    "user metadata store parallel_tool_calls reasoning_effort service_tier safety_identifier prompt_cache_key verbosity"
).split()
"""Fields that do not concern what the policy reads and writes."""


OPEN = ConfigDict(extra="allow")


class _Function(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: str


class _Part(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    text: NotRequired[str]


class _Tool(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    function: _Function


class _Message(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    role: str
    content: NotRequired[str | list[_Part] | None]
    tool_calls: NotRequired[list[_Tool] | None]


class Body(BaseModel):
    """The fields of a request that count."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    messages: list[_Message] = []
    prompt: str | list[int] = ""
    tools: list[_Tool] | None = None
    n: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer and are cut from it."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def read_body(body: Mapping[str, Any], model: str, cut: Cut, *, refuses: bool) -> Body:
    """Return the body of a request. `refuses`: refuse a seed, and a sampling that differs from `cut`. Raises
    RefusedError with the field that no request may have, or whose value is wrong.
    """
    for name, values in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in values:
            raise RefusedError(f"{name}={body[name]!r:.60} does not sample from the policy as it is: leave it out")
    # A neutral value asks for nothing; tool_choice="none" hides the tools.
    fields = {name: value for name, value in body.items() if name not in NEUTRAL and name not in IGNORED}
    if body.get("tool_choice") == "none":
        fields.pop("tools", None)
    try:
        found = Body.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise RefusedError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if found.model != model:
        raise RefusedError(
            f"model: there is no {found.model!r}; there is {model!r}", status=404, code="model_not_found"
        )
    if "" in found.stops:
        raise RefusedError("stop: an empty text ends every answer: leave it out")
    own = {"temperature": cut.temperature, "top_p": cut.top_p, "min_p": cut.min_p, "top_k": cut.top_k, "seed": None}
    other = [name for name, value in own.items() if getattr(found, name) not in (None, value)]
    if other and refuses:
        raise RefusedError(f"{other[0]}: the policy trains on what it samples with {own}; leave it out")
    return found


FORMATS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.S)
    for name, pattern in {
        "xml": r"<tool_call>\s*<function=(?P<name>[^>]+)>(?P<arguments>.*?)</function>\s*</tool_call>",
        "glm": r"<tool_call>(?P<name>[\w.-]+)\s*(?P<arguments>(?:<arg_key>.*?)?)\s*</tool_call>",
        "hermes": r"<tool_call>\s*(?P<calls>\{.*?\})\s*</tool_call>",
        "mistral": r"\[TOOL_CALLS\]\s*(?P<calls>\[.*?\])\s*(?=</s>|$)",
        # Its bars and blanks are letters of their own.
        "deepseek": r"(?:<.tool.calls.begin.>)?<.tool.call.begin.>(?:function<.tool.sep.>)?(?P<name>[^<\n]+)"
        r"(?:\n```json\n|<.tool.sep.>)(?P<arguments>.*?)(?:\n```)?\s*<.tool.call.end.>",
        "kimi": r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>functions\.(?P<name>[^:]+):\d+\s*"
        r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
        "llama3": r"(?:^|>)\s*(?:<\|python_tag\|>)?(?P<calls>\{\s*\"name\".*?\})\s*(?=<\|eo[tm]_id\|>|$)",
    }.items()
}
"""Patterns of tool calls: `calls` is the JSON of one or several, `name` and `arguments` are the parts of one."""
PARAMETER = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S
)
THINKING = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.S)
PROBE = "mcorerlprobe"
CHANNEL = "<|channel|>"


def format_of(chat: Chat) -> str | None:
    """Return the format in which the template renders a tool call; None if it is none of `FORMATS`. Raises ConfigError
    for a template that writes an answer as several messages, each to a channel (gpt-oss).
    """
    function = {"name": PROBE, "description": "", "parameters": {"type": "object"}}
    # Other patterns may fit the tools' description, which some templates show in the form of a call.
    wanted = ({"name": PROBE, "arguments": {"a": 1}}, {"name": PROBE, "arguments": {"a": "1"}})
    for number in ("abcdef012", f"functions.{PROBE}:0"):  # Mistral's and Kimi's template take no other ids
        call = {"id": number, "type": "function", "function": {"name": PROBE, "arguments": {"a": 1}}}
        messages = (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": number, "content": "0"},
        )
        with suppress(DataError):
            tools = ({"type": "function", "function": function},)
            text = chat.decode(chat.prompt(Conversation(messages=messages, tools=tools)))
            if CHANNEL in text:
                raise ConfigError(
                    f"the chat template writes an answer as several messages, each to a channel ({CHANNEL}, gpt-oss's "
                    "format), of which rl.agent reads none. Set data.chat_template to a file that writes one message "
                    f'an answer, with calls in one of the formats {", ".join(FORMATS)}; without tools "plain" will do.'
                )
            for kind in FORMATS:
                if any(found in wanted for _, found in _calls(text, kind)):
                    return kind
    return None


def message_of(text: str, tools: Sequence[Mapping[str, Any]], kind: str | None) -> dict[str, Any]:
    """Return a text's message: reasoning, content, calls of `tools` in the format `kind`. Unreadable calls stay
    content.
    """
    message: dict[str, Any] = {"role": "assistant"}
    if found := THINKING.match(text):
        message["reasoning_content"], text = found[1].strip(), text[found.end() :]
    if tools and kind is not None:
        names = {tool["function"]["name"] for tool in tools}
        calls = [(at, call) for at, call in _calls(text, kind) if call["name"] in names]
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"functions.{call['name']}:{n}" if kind == "kimi" else secrets.token_hex(5)[:9],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
                }
                for n, (_, call) in enumerate(calls)
            ]
            text = text[: calls[0][0]]
    message["content"] = text
    return message


def _calls(text: str, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the calls in a text that can be read, with the place at which their mark begins."""
    for match in FORMATS[kind].finditer(text):
        found: dict[str, Any] = match.groupdict()
        if kind in ("xml", "glm"):
            found["arguments"] = {a or c: b or d for a, b, c, d in PARAMETER.findall(match["arguments"])}
        try:
            calls = json.loads(found["calls"]) if "calls" in found else [found]
            for call in calls if isinstance(calls, list) else [calls]:
                arguments = call.get("arguments", call.get("parameters", {}))
                if kind in ("deepseek", "kimi"):
                    arguments = json.loads(arguments)
                if isinstance(call["name"], str):
                    yield match.start(), {"name": call["name"].strip(), "arguments": arguments}
        except (ValueError, KeyError, AttributeError):
            continue


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def choice_of(
    index: int, completion: Completion, whole: str, message: Mapping[str, Any], body: Body, chat: Chat
) -> dict[str, Any]:
    """Return one of an answer's choices in OpenAI's form, with vLLM's `stop_reason`, the string that ended it, which
    `whole` still has; an empty `message` means the form of raw completions.
    """
    text = cut_at_stop(whole, body.stops)
    finish = "tool_calls" if message.get("tool_calls") else completion.finish
    stopped = next((stop for stop in body.stops if whole.startswith(stop, len(text))), None)
    choice: dict[str, Any] = {"index": index, "finish_reason": finish, "stop_reason": stopped, "logprobs": None}
    choice |= {"message": message} if message else {"text": text}
    if body.logprobs not in (None, False):
        pieces = [chat.decode([token]) for token in completion.tokens_T]
        choice["logprobs"] = {"tokens": pieces, "token_logprobs": [*completion.logprobs_T]}
        if message:
            listed = [
                {"token": piece, "logprob": value, "bytes": [*piece.encode()], "top_logprobs": []}
                for piece, value in zip(pieces, completion.logprobs_T, strict=True)
            ]
            choice["logprobs"] = {"content": listed}
    if body.return_token_ids:
        choice["token_ids"] = [*completion.tokens_T]
    return choice


def answer_of(
    kind: str, body: Body, choices: Sequence[Mapping[str, Any]], prompt_T: Sequence[int], num_sampled: int
) -> dict[str, Any]:
    """Return an answer in OpenAI's form; `kind` is "chat.completion" or "text_completion"."""
    usage = {"prompt_tokens": len(prompt_T), "completion_tokens": num_sampled}
    answer = {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "choices": [*choices],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }
    return answer | ({"prompt_token_ids": [*prompt_T]} if body.return_token_ids else {})
