"""Agents for tests, and their sessions; apart from the tests, so that ranks and workers can import them."""

import dataclasses
import json
import math
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.agent import AgentConfig
from mcore_rl.config.rl.rollout import EnvironmentConfig, RewardConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.chat import Chat
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.agents.hold import AgentSessions
from mcore_rl.rl.agents.run import Run
from mcore_rl.rl.engines.base import Capabilities, Engine, QuietEngine, Sampling
from mcore_rl.rl.rollouts.rollout import runs_rewards
from mcore_rl.rl.types import Completion, Group, Prompt, single_version
from tests.conversing import END, chat_of, config_of, sampling, seeds_of

Json = dict[str, Any]


def post(url: str, key: str, body: Json | bytes, headers: Json | None = None) -> tuple[int, Any]:
    """Status and body of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Client:
    """Asks as an official client, without repeating anything."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def raw(self, path: str = "/chat/completions", headers: Json | None = None, **fields: Any) -> tuple[int, Json]:
        status, text = post(self.run.base_url + path, self.run.api_key, {"model": self.run.model, **fields}, headers)
        return status, json.loads(text)

    def ask(self, messages: Sequence[Json], **fields: Any) -> Json:
        """The message of the answer. Raises ValueError for a refusal."""
        status, answer = self.raw(messages=[*messages], **fields)
        if status != 200:
            raise ValueError(answer["error"]["code"])
        return answer["choices"][0]["message"]

    def text(self, messages: Sequence[Json], **fields: Any) -> str:
        return self.ask(messages, **fields)["content"]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def echo(run: Run, turns: int = 3) -> float:
    """Do as `conversing.Echo`: return the length and the beginning of each turn, which is worth half its number."""
    client, messages, reward = Client(run), [user(run.problem.prompt)], 0.0
    for n in range(turns):
        text = client.text(messages)
        reward += (n + 1) / 2
        messages += [{"role": "assistant", "content": text}, user(f"{len(text)} {text[:3]}")]
    return reward


def forking(run: Run) -> Json:
    """Compacts its history after two turns, edits it after three, asks others beside it, and draws two at once."""
    client, messages, texts = Client(run), [user(run.problem.prompt)], []
    for n in range(4):
        texts.append(client.text(messages, temperature=0.2, seed=7))
        messages += [{"role": "assistant", "content": texts[-1]}, user(f"{len(texts[-1])} more")]
        if n == 1:
            messages = [user(f"so far {texts[0][:4]}")]
        if n == 2:
            messages[0] = user("?")
    with ThreadPoolExecutor(2) as threads:
        texts += threads.map(lambda word: client.text([user(word)]), ["left", "right"])
    status, answer = client.raw("/completions", prompt="u:hi", n=2)
    assert status == 200
    texts += [choice["text"] for choice in answer["choices"]]
    letters = "".join(texts)
    return {"reward": sum("a" <= letter <= "m" for letter in letters) / max(1, len(letters)), "note": "half"}


def compacting(run: Run) -> float:
    """Forgets its first turn: a sample of two segments, or of three where it asks another agent."""
    client, messages = Client(run), [user(run.problem.prompt)]
    text = client.text(messages)
    client.text([*messages, {"role": "assistant", "content": text}, user("more")])
    said = client.text([user(f"{run.problem.prompt}{text[:1]}")])
    return sum(given == wanted for given, wanted in zip(said, run.problem.answer, strict=False))


def tooled(run: Run) -> float:
    """Runs the tools that the policy calls until it calls none; to a turn without calls it answers what another agent
    says. Returns the sum of the tools' results.
    """
    client, messages, total = Client(run), [user("go")], 0.0
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "mul")]
    while True:
        said = client.ask(messages, tools=tools)
        # As harnesses send it back: without reasoning, and with nulls.
        messages.append({**said, "reasoning_content": None, "refusal": None})
        if said["content"] == "end":
            assert said["reasoning_content"] == "done?"
            return total
        if "tool_calls" not in said:
            messages.append(user(client.text([{"role": "system", "content": "help"}, user("?")])))
            continue
        (call,) = said["tool_calls"]
        values = json.loads(call["function"]["arguments"])
        result = values["a"] + values["b"] if call["function"]["name"] == "add" else values["a"] * values["b"]
        total += result
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})


def calling(run: Run) -> float:
    """Does as `echo`, as often as `calls` says."""
    return echo(run, int(run.arguments["calls"]))


async def patient(run: Run) -> float:
    return echo(run, 1)


def faulty(run: Run) -> Any:
    """Goes wrong as its problem says, mostly after an answer."""
    client, fault = Client(run), run.problem.answer
    if fault == "silent":
        return 1.0
    first = [user("hello")]
    client.text(first)
    match fault:
        case "raise":
            raise KeyError("lost")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), 9)
        case "nan":
            return math.nan
        case "none":
            return None
        case "text":
            return "well done"
        case "children":
            sleeper = ["setsid", "sleep", "600"]
            Path(str(run.arguments["folder"]), f"{run.seed}").write_text(str(subprocess.Popen(sleeper).pid))
        case "context" | "turns":
            refused = ""
            for n in range(30):
                try:
                    client.text([user(str(n) * (30 if fault == "context" else 1))])
                except ValueError as error:
                    refused = str(error)
            assert refused == ("context_length_exceeded" if fault == "context" else "invalid_request_error")
    return 1.0


CHAT, TEXT = "/chat/completions", "/completions"
SAID = [user("hi")]
REQUESTS: dict[str, tuple[str, Json | bytes, Json, int, str]] = {
    # Name: path, body, headers, wanted status, word of the message.
    "fine": (CHAT, {"messages": SAID}, {}, 200, ""),
    "fields of no concern": (CHAT, {"messages": SAID, "user": "me", "logit_bias": {}, "n": 1}, {}, 200, ""),
    "parts of text": (CHAT, {"messages": [user([{"type": "text", "text": "hi"}])]}, {}, 200, ""),
    "another temperature": (CHAT, {"messages": SAID, "temperature": 0.0, "seed": 4}, {}, 200, ""),
    "image": (CHAT, {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, {}, 400, "image_url"),
    "another model": (CHAT, {"messages": SAID, "model": "gpt-9"}, {}, 404, "gpt-9"),
    "no messages": (CHAT, {}, {}, 400, "messages"),
    "messages of text": (CHAT, {"messages": "hi"}, {}, 400, "messages"),
    "message without role": (CHAT, {"messages": [{"content": "hi"}]}, {}, 400, "role"),
    "message of numbers": (CHAT, {"messages": [user(5)]}, {}, 400, "content"),
    "prefill": (CHAT, {"messages": [*SAID, {"role": "assistant", "content": "x"}]}, {}, 400, "end with"),
    "calls without a name": (CHAT, {"messages": [{**SAID[0], "tool_calls": [{}]}, *SAID]}, {}, 400, "tool_calls"),
    "negative n": (CHAT, {"messages": SAID, "n": -1}, {}, 400, "n: "),
    "n of text": (CHAT, {"messages": SAID, "n": "two"}, {}, 400, "n: "),
    "no tokens": (CHAT, {"messages": SAID, "max_tokens": 0}, {}, 400, "max_tokens"),
    "stop of numbers": (CHAT, {"messages": SAID, "stop": 5}, {}, 400, "stop"),
    "empty stop": (CHAT, {"messages": SAID, "stop": [""]}, {}, 400, "stop"),
    "a penalty": (CHAT, {"messages": SAID, "presence_penalty": 0.5}, {}, 400, "presence_penalty"),
    "a bias": (CHAT, {"messages": SAID, "logit_bias": {"5": 1}}, {}, 400, "logit_bias"),
    "json": (CHAT, {"messages": SAID, "response_format": {"type": "json_object"}}, {}, 400, "response_format"),
    "other tokens": (CHAT, {"messages": SAID, "top_logprobs": 3}, {}, 400, "top_logprobs"),
    "a forced tool": (CHAT, {"messages": SAID, "tool_choice": "required"}, {}, 400, "tool_choice"),
    "tools without a format": (CHAT, {"messages": SAID, "tools": [{"function": {"name": "f"}}]}, {}, 400, "hermes, "),
    "an unknown field": (CHAT, {"messages": SAID, "guided_regex": "a+"}, {}, 400, "guided_regex"),
    "another key": (CHAT, {"messages": SAID}, {"Authorization": "Bearer sk-" + 32 * "0"}, 401, "key"),
    "no key": (CHAT, {"messages": SAID}, {"Authorization": ""}, 401, "key"),
    "a key of no letters": (CHAT, {"messages": SAID}, {"Authorization": "Bearer \xe9\xff"}, 401, "key"),
    "another path": ("/embeddings", {"input": "hi"}, {}, 404, "path"),
    "a path above": ("/../chat/completions", {"messages": SAID}, {}, 404, "path"),
    "no JSON": (CHAT, b"{", {}, 400, "JSON"),
    "a list": (CHAT, b"[]", {}, 400, "object"),
    "no body": (CHAT, b"", {}, 400, "body"),
    "deep JSON": (CHAT, b"[" * 100_000, {}, 400, "JSON"),
    "a body of 100 MB": (CHAT, b" " * 100_000_000, {}, 400, "body"),
    "text": (TEXT, {"prompt": "hi"}, {}, 200, ""),
    "ids": (TEXT, {"prompt": [3, 4], "logprobs": 1, "return_token_ids": True}, {}, 200, ""),
    "other ids": (TEXT, {"prompt": [3, 4000]}, {}, 400, "prompt"),
    "ids of text": (TEXT, {"prompt": ["a", "b"]}, {}, 400, "prompt"),
    "no prompt": (TEXT, {}, {}, 400, "prompt"),
    "a long prompt": (TEXT, {"prompt": "a" * 3000}, {}, 400, "context"),
}


def probing(run: Run) -> float:
    """Makes every request of the table, and writes the status, message and seconds of each answer to a file."""
    found = {}
    for name, (path, body, headers, *_) in REQUESTS.items():
        start_s = time.perf_counter()
        fields = body if isinstance(body, bytes) else {"model": run.model, **body}
        status, text = post(run.base_url + path, run.api_key, fields, headers)
        found[name] = (status, text, time.perf_counter() - start_s)
    Path(str(run.arguments["folder"]), "probed").write_text(json.dumps(found))
    return 0.5


def repeating(run: Run) -> float:
    """Loses an answer, asks again as official clients do, during and after the first answer; makes equal requests."""
    client = Client(run)
    host, port = run.base_url.split("/")[2].split(":")
    lost = json.dumps({"model": run.model, "messages": [user("lost")]})
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {run.api_key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(lost)}\r\n\r\n{lost}".encode())
    again = {"x-stainless-retry-count": "1"}
    first = client.raw(messages=[user("once")])[1]
    assert client.raw(messages=[user("once")], headers=again)[1] == first
    assert client.raw(messages=[user("once")], headers=again)[1] == first
    with ThreadPoolExecutor(2) as threads:  # the second waits for the first one's answer, or finds it
        both = [*threads.map(lambda extra: client.raw(messages=[user("same")], headers=extra), [{}, again])]
    assert all(status == 200 for status, _ in both)
    twice = [client.raw(messages=[user("twice")])[1]["choices"][0]["message"]["content"] for _ in range(2)]
    assert twice[0] != twice[1]
    return 1.0


def streaming(run: Run) -> float:
    """Reads an answer as a stream, and the same one whole."""
    client, fields = Client(run), {"messages": SAID, "stop": ["e", "a"], "logprobs": True}
    status, whole = client.raw(**fields)
    body = {"model": run.model, **fields, "stream": True, "stream_options": {"include_usage": True}}
    again = {"x-stainless-retry-count": "1"}
    status, text = post(run.base_url + CHAT, run.api_key, body, again)
    assert status == 200
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    delta = chunks[0]["choices"][0]["delta"]
    assert delta["role"] == "assistant" and not {"a", "e"} & {*delta["content"]}
    assert chunks[1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert not {"a", "e"} & {*whole["choices"][0]["message"]["content"]}
    assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    return 1.0


PROGRAM = """
import json, os, subprocess, sys, urllib.request

problem = json.load(sys.stdin)
def ask(path, body, headers):
    url = os.environ["OPENAI_BASE_URL" if "Authorization" in headers else "ANTHROPIC_BASE_URL"] + path
    body = {"model": os.environ["MCORE_RL_MODEL"], "messages": [{"role": "user", "content": problem["prompt"]}], **body}
    headers = headers | {"Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
ask("/chat/completions", {}, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = ask("/v1/messages", {"max_tokens": 4}, {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
assert said["type"] == "message" and said["content"][0]["type"] == "text", said
assert os.listdir(os.environ["MCORE_RL_FOLDER"]) == [] and "SOME_SECRET" not in os.environ
print("here", os.getcwd())
fault = problem["answer"]
if fault == "three":
    print("last words")
    sys.exit(3)
if fault == "children":
    child = subprocess.Popen(["setsid", "sleep", "600"])
    open(problem["arguments"]["folder"] + "/pid", "w").write(str(child.pid))
results = {"fine": {"reward": 1.5}, "children": {"reward": 1}, "nan": {"reward": float("nan")}, "list": [1]}
if fault in results:
    json.dump(results[fault], open(os.environ["MCORE_RL_RESULT"], "w"))
"""
"""A program that asks in OpenAI's and in Anthropic's form, and goes wrong as its problem says."""


TOOL_IN = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}


def anthropic(run: Run) -> float:
    """Asks in Anthropic's form, with a tool, whole and as a stream; it shows that one history is one segment."""
    url, key = f"{run.base_url}/messages", run.api_key
    system = [{"type": "text", "text": "calculate", "cache_control": {"type": "ephemeral"}}]
    body = {"model": run.model, "max_tokens": 90, "system": system, "tools": [TOOL_IN], "messages": [user("go")]}
    status, text = post(url, key, body, {"x-api-key": key})
    assert status == 200, text
    first = json.loads(text)
    assert first["stop_reason"] == "tool_use" and first["usage"]["output_tokens"] > 0
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
    call = first["content"][1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    assert call["input"] == {"a": 1, "b": 2}
    body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    status, text = post(url, key, {**body, "stream": True, "stop_sequences": ["!"]})
    assert status == 200, text
    lines = [event.split("\n") for event in text.split("\n\n") if event]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]
    assert all(name == event["type"] for name, event in events)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert deltas == [{"type": "thinking_delta", "thinking": "easy"}, {"type": "text_delta", "text": "end"}]
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "!"}
    image = {"type": "image", "source": {"type": "base64", "data": ""}}
    for wrong, word in (
        ({"messages": [{"role": "user", "content": [image]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "input_schema"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"context_management": {}}, "context_management"),
    ):
        status, text = post(url, key, {**body, **wrong})
        error = json.loads(text)
        assert status == 400 and error["type"] == "error" and word in error["error"]["message"], text
    return 1.0


def turn_of(tokens_T: tuple[int, ...]) -> Completion:
    num = len(tokens_T)
    versions = single_version(3, num)
    return Completion(text="", tokens_T=tokens_T, logprobs_T=(-1.0,) * num, versions=versions, finish="stop")


class Scripted(QuietEngine):
    """Answers with the text that a function makes of the prompt's text, whatever the seed; a token a character. The
    logprobs are those of `score`, a function of all tokens (each row by token), or -1.
    """

    capabilities = Capabilities(max_tokens=100_000, routes=False, seeded=True)
    policy_version = 0

    def __init__(
        self,
        script: Callable[[str], str],
        chat: Chat,
        score: Callable[[Sequence[int]], list[dict[int, float]]] | None = None,
    ) -> None:
        self._script, self._chat, self._score, self.prompts = script, chat, score, []

    def decode(self, tokens_T: Sequence[int], /) -> str:
        return self._chat.decode([token for token in tokens_T if token != END])

    def update_weights(self, policy_version: int) -> None: ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        groups = []
        for prompt, seeds in zip(prompts, seeds_PG, strict=True):
            asked = self._chat.decode(prompt.tokens_T)
            self.prompts.append(asked)
            text = self._script(asked)
            tokens_T = (*(ord(letter) - 31 for letter in text), END)
            one = dataclasses.replace(turn_of(tokens_T), text=text)
            if self._score is not None:
                rows = self._score(prompt.tokens_T + tokens_T)[-len(tokens_T) :]
                logprobs_T = tuple(row[token] for row, token in zip(rows, tokens_T, strict=True))
                one = dataclasses.replace(one, logprobs_T=logprobs_T)
            groups.append(Group(prompt=prompt, completions=(one,) * len(seeds)))
        return groups


TOOLS = (
    "{% if tools %}[{% for one in tools %}{{ one.function.name }} {% endfor %}]{% endif %}"
    "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}"
    "{% for call in one.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def script(asked: str) -> str:
    """Adds, multiplies, asks a sub-agent at the seventh turn, and says the result at the twelfth."""
    if asked.startswith("s:"):
        return "sub"
    turn = asked.count("a:")
    if turn == 12:
        return "<think>done?</think>end"
    if turn == 7:
        return "ask the other"
    name, values = ("add", {"a": turn, "b": 2}) if turn % 2 else ("mul", {"a": turn, "b": 3})
    return f'well <tool_call>{{"name": "{name}", "arguments": {json.dumps(values)}}}</tool_call>'


def agent_config(model: ModelConfig, function: str, template: str = "tokenizer", **agent: Any) -> RlRunConfig:
    """`conversing.config_of` with an agent in the place of its environment."""
    config = config_of(model, template)
    fields = {"function": f"tests.sessions:{function}" if function else None, "sessions": 4, "max_tokens": 200} | agent
    rl = config.rl.model_copy(
        update={
            "environment": EnvironmentConfig(),
            "agent": AgentConfig(**fields),
            "reward": RewardConfig(parts=("environment",)),
        }
    )
    return config.model_copy(update={"rl": rl})


@contextmanager
def sessions_of(config: RlRunConfig, engine: Engine, folder: Path, mesh: Mesh) -> Iterator[AgentSessions]:
    tokenizer, chat = chat_of(config, folder)
    ends = {END, *config.rl.rollout.stop_tokens}
    with AgentSessions(config.rl, engine, chat, tokenizer, mesh, ends, serves=runs_rewards(mesh)) as sessions:
        yield sessions


def run_sessions(
    config: RlRunConfig,
    engine: Engine,
    folder: Path,
    mesh: Mesh,
    prompts: Sequence[Prompt],
    *,
    group_size: int = 2,
    with_routes: bool = False,
) -> list[Group]:
    """Sessions about `prompts`, with the seeds of `conversing.held`."""
    tokenizer, _ = chat_of(config, folder)
    with sessions_of(config, engine, folder, mesh) as sessions:
        rules = sampling(config, tokenizer, with_routes=with_routes)
        return sessions.hold(prompts, rules, [seeds_of(prompt, group_size) for prompt in prompts])
