"""Anthropic's form of messages (/v1/messages), to and from OpenAI's chat form, which the session understands."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.rl.agents.endpoint import RefusedError

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier")
"""Fields of the same meaning in both forms."""
CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat form of a body. Unknown fields stay, so that they are refused. Raises RefusedError for a part of
    a message that is neither text, thinking, nor a tool's call or result, and for a body of another form.
    """
    known = (*SAME, "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking")
    try:
        found = {name: value for name, value in body.items() if name in SAME or name not in known}
        if body.get("stop_sequences"):
            found["stop"] = body["stop_sequences"]
        for tool in body.get("tools") or ():
            if "input_schema" not in tool:
                raise RefusedError(
                    f"tools: {tool!r:.60} is no tool with a name and an input_schema, which the agent runs"
                )
            function = {"name": tool["name"], "description": tool.get("description", "")}
            function["parameters"] = tool["input_schema"]
            found.setdefault("tools", []).append({"type": "function", "function": function})
        if body.get("tool_choice"):
            found["tool_choice"] = CHOICES.get(body["tool_choice"].get("type"), "required")
        system = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
        found["messages"] = [*system, *(part for message in body.get("messages", ()) for part in _messages(message))]
    except (KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"the body is not of Anthropic's form: {type(error).__name__}: {error}") from None
    return found


def _text(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise RefusedError(f"messages: a part of type {other[0]!r}; only texts are read by the policy")
    return "".join(part["text"] for part in parts)


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message's results of tools as messages of their own, then the rest."""
    role, content = message["role"], message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    by_type: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        by_type.setdefault(part["type"], []).append(part)
    for result in by_type.pop("tool_result", ()):
        yield {"role": "tool", "tool_call_id": result["tool_use_id"], "content": _text(result.get("content"))}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["input"], ensure_ascii=False)},
        }
        for call in by_type.pop("tool_use", ())
    ]
    thinking = "".join(part["thinking"] for part in by_type.pop("thinking", ()))
    by_type.pop("redacted_thinking", None)
    text = _text([part for of_type in by_type.values() for part in of_type])
    if by_type or calls or role == "assistant":
        reasoning = {"reasoning_content": thinking} if thinking else {}
        yield {"role": role, "content": text, **reasoning, **({"tool_calls": calls} if calls else {})}


def message_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a chat, of one choice, as Anthropic's message."""
    [choice], message = answer["choices"], answer["choices"][0]["message"]
    content: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"] or not message.get("tool_calls"):
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    usage, stopped = answer["usage"], choice["stop_reason"]
    return {
        "id": answer["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": "stop_sequence" if stopped else REASONS[choice["finish_reason"]],
        "stop_sequence": stopped,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
