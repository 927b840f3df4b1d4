"""Official clients of OpenAI's and Anthropic's APIs against the endpoint (make test-agents installs them)."""

import json
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.agents.run import Run
from mcore_rl.rl.types import Completion
from tests.conversing import chat_of, problems, write_tokenizer
from tests.hf_models import oracle
from tests.sessions import TOOL_IN, TOOLS, Scripted, agent_config, run_sessions

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLING = 'well <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
DELAY_S = 3.0


def slowly(asked: str) -> str:
    """Answers a request about "slow" later than its client waits, calls a tool, and ends once it has the result."""
    if "slow" in asked:
        time.sleep(DELAY_S)
        return "late"
    return "<think>easy</think>end" if "t:3" in asked else CALLING


async def by_openai(run: Run) -> float:
    """Calls a tool, whole and as a stream; is refused; loses an answer, which the client asks for again."""
    client = openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    first = await client.chat.completions.create(model=run.model, messages=messages, tools=[TOOL], temperature=0)
    said = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and said.content == "well "
    [call] = said.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    stream = await client.chat.completions.create(
        model=run.model, messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    parts = [part async for part in stream]
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "end"
    assert parts[-1].usage.completion_tokens > 0
    assert [model.id async for model in client.models.list()] == [run.model]
    begin_s = time.perf_counter()
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        await client.chat.completions.create(model=run.model, messages=messages, presence_penalty=1.0)
    with pytest.raises(openai.AuthenticationError):
        await openai.AsyncOpenAI(base_url=run.base_url, api_key="sk-0").chat.completions.create(
            model=run.model, messages=messages
        )
    assert time.perf_counter() - begin_s < 30, "a refusal is not asked again"
    slow: list[Any] = [{"role": "user", "content": "slow"}]
    patient = client.with_options(timeout=DELAY_S * 0.7, max_retries=5)
    late = await patient.chat.completions.create(model=run.model, messages=slow)
    assert late.choices[0].message.content == "late"
    return 1.0


def by_anthropic(run: Run) -> float:
    """The same, in Anthropic's form."""
    client = anthropic.Anthropic(base_url=run.base_url.removesuffix("/v1"), api_key=run.api_key)
    fields: dict[str, Any] = {"model": run.model, "max_tokens": 90, "tools": [TOOL_IN]}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    first = client.messages.create(messages=messages, **fields)
    text, call = first.content
    assert (first.stop_reason, text.text, call.name, call.input) == ("tool_use", "well ", "add", {"a": 1, "b": 2})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **fields) as stream:
        last = stream.get_final_message()
    assert [block.type for block in last.content] == ["thinking", "text"] and last.content[1].text == "end"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(messages=messages, **fields, tool_choice={"type": "any"})
    patient = client.with_options(timeout=DELAY_S * 0.7, max_retries=5)
    late = patient.messages.create(model=run.model, max_tokens=90, messages=[{"role": "user", "content": "slow"}])
    assert late.content[0].text == "late"
    return 1.0


@pytest.mark.parametrize("function", ["by_openai", "by_anthropic"])
def test_an_official_client_calls_tools_streams_and_asks_again_without_a_second_call(
    function: str, mesh: Mesh, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    (tmp_path / "tools.jinja").write_text(TOOLS)
    config = agent_config(oracle("qwen3_moe").ours, "", str(tmp_path / "tools.jinja"), max_tokens=2000)
    agent = config.rl.agent.model_copy(update={"function": f"tests.clients.test_clients:{function}"})
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"agent": agent})})
    _, chat = chat_of(config, folder)
    (group,) = run_sessions(config, Scripted(slowly, chat), folder, mesh, problems("a"), group_size=1)
    one: Completion = group.completions[0]
    assert one.episode is not None and one.episode.failure is None, one.episode
    # The tool's call, the end, and the late answer once, which is a segment of its own.
    assert len(one.episode.turns) == 3 and len(one.segments) == 1
