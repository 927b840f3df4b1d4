"""From the body of a request to sampling, and from the policy's text to a message with reasoning and tool calls."""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from mcore_rl.data.chat import Chat, Conversation
from mcore_rl.errors import DataError
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


class Body(BaseModel):
    """The fields of a request that count."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    messages: list[dict[str, Any]] = []
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]] | None = None
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
    for message in found.messages:
        _check_message(message)
    for tool in found.tools or ():
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise RefusedError(f'tools: {tool!r:.60} is no {{"type": "function", "function": {{"name": ...}}}}')
    return found


def _check_message(message: Mapping[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise RefusedError(f'messages: {message!r:.60} has no "role"')
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else []
    if not all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts):
        raise RefusedError(f"messages: the content {content!r:.60} is no text")
    if calls is not None and not (
        isinstance(calls, list)
        and all(
            isinstance(call, dict)
            and isinstance(call.get("function"), dict)
            and isinstance(call["function"].get("name"), str)
            for call in calls
        )
    ):
        raise RefusedError(f"messages: tool_calls={calls!r:.60} are no list of calls")


FORMATS: dict[str, tuple[str, re.Pattern[str]]] = {
    "xml": ("<function=", re.compile(r"<tool_call>\s*<function=([^>]+)>(.*?)</function>\s*</tool_call>", re.S)),
    "hermes": ("<tool_call>", re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)),
}
"""Formats of tool calls: a mark in the rendering of a call, and the pattern of a call; the first match counts."""
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.S)
THINKING = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.S)
PROBE = "mcorerlprobe"


def format_of(chat: Chat) -> str | None:
    """Return the format in which the template renders a tool call; None if it is none of `FORMATS`."""
    call = {"type": "function", "function": {"name": PROBE, "arguments": {"a": 1}}}
    messages = (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "0"},
    )
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {"type": "object"}}}
    try:
        text = chat.decode(chat.prompt(Conversation(messages=messages, tools=(tool,))))
    except DataError:
        return None
    # The tools' description may show the format too, of which the call itself is the last one.
    shown = text[: text.rfind(PROBE)]
    marks = {name: shown.rfind(mark) for name, (mark, _) in FORMATS.items()}
    found = [name for name, at in marks.items() if at >= 0 and len(shown) - at < 40]
    return found[0] if found else None


def message_of(text: str, tools: Sequence[Mapping[str, Any]], kind: str | None) -> dict[str, Any]:
    """Return a text's message: reasoning, content, calls of `tools` in the format `kind`. Unreadable calls stay
    content.
    """
    message: dict[str, Any] = {"role": "assistant"}
    if found := THINKING.match(text):
        message["reasoning_content"], text = found[1].strip(), text[found.end() :]
    if tools and kind is not None:
        names = {tool["function"]["name"] for tool in tools}
        matches = [(match, _call(match, kind)) for match in FORMATS[kind][1].finditer(text)]
        calls = [(match, call) for match, call in matches if call is not None and call["name"] in names]
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
                }
                for _, call in calls
            ]
            text = text[: calls[0][0].start()]
    message["content"] = text
    return message


def _call(match: re.Match[str], kind: str) -> Mapping[str, Any] | None:
    if kind == "xml":
        return {"name": match[1], "arguments": dict(PARAMETER.findall(match[2]))}
    try:
        call = json.loads(match[1])
    except ValueError:
        return None
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str)
    return {"name": call["name"], "arguments": call.get("arguments", {})} if is_call else None


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def choice_of(
    index: int, completion: Completion, text: str, message: Mapping[str, Any], body: Body, chat: Chat
) -> dict[str, Any]:
    """Return one of an answer's choices in OpenAI's form; an empty `message` means the form of raw completions."""
    finish = "tool_calls" if message.get("tool_calls") else completion.finish
    choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
    choice |= {"message": message} if message else {"text": text}
    if body.logprobs not in (None, False):
        pieces = [chat.decode([token]) for token in completion.tokens_T]
        choice["logprobs"] = {"tokens": pieces, "token_logprobs": [*completion.logprobs_T]}
        if message:
            choice["logprobs"] = {
                "content": [
                    {"token": piece, "logprob": value, "bytes": [*piece.encode()], "top_logprobs": []}
                    for piece, value in zip(pieces, completion.logprobs_T, strict=True)
                ]
            }
    if body.return_token_ids:
        choice["token_ids"] = [*completion.tokens_T]
    return choice


def answer_of(
    kind: str, body: Body, choices: Sequence[Mapping[str, Any]], prompt_T: Sequence[int], num_sampled: int
) -> dict[str, Any]:
    """Return an answer in OpenAI's form; `kind` is "chat.completion" or "text_completion"."""
    answer = {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "choices": [*choices],
        "usage": {
            "prompt_tokens": len(prompt_T),
            "completion_tokens": num_sampled,
            "total_tokens": len(prompt_T) + num_sampled,
        },
    }
    return answer | ({"prompt_token_ids": [*prompt_T]} if body.return_token_ids else {})
