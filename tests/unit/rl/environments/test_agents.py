"""Sessions of agents: what they become, and what goes wrong in them."""

import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mcore_rl.data.chat import Conversation
from mcore_rl.data.packing import PackingLimits
from mcore_rl.errors import ConfigError, TrainingError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.rl import workers
from mcore_rl.rl.agents import session as session_module
from mcore_rl.rl.agents.answers import format_of, message_of
from mcore_rl.rl.agents.anthropic import chat_body
from mcore_rl.rl.agents.endpoint import RefusedError
from mcore_rl.rl.agents.hold import try_agent
from mcore_rl.rl.agents.session import Call, Session, common_length, identity
from mcore_rl.rl.batch import LogprobHead, PolicyMicrobatch, evaluating, make_microbatch
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.environments.conversations import turn_seed
from mcore_rl.rl.types import Completion, Prompt, SampleShape, TrainedSample, single_version
from mcore_rl.rl.workers import WorkerPool
from tests.conversing import END, chat_of, config_of, held, problems
from tests.hf_models import VOCAB, Oracle
from tests.served_model import ModelAnswers
from tests.sessions import PROGRAM, REQUESTS, TOOLS, Scripted, agent_config, run_sessions, script, turn_of, user

SIX = problems(*"123456")


def sample_of(prompt: Prompt, one: Completion) -> TrainedSample:
    return TrainedSample(
        tokens_T=torch.tensor(prompt.tokens_T + one.tokens_T),
        rollout_logprobs_C=torch.tensor(one.logprobs_T),
        shape=SampleShape(
            replica_rank=0,
            num_prompt_tokens=len(prompt.tokens_T),
            num_completion_tokens=len(one.tokens_T),
            is_trained=True,
            sampled_spans=one.sampled_spans,
            segments=one.segments,
        ),
    )


def trained_logprobs(
    chunks: list[nn.Module], mesh: Mesh, pairs: Sequence[tuple[Prompt, Completion]]
) -> tuple[PolicyMicrobatch, torch.Tensor]:
    """The completions in one microbatch, and the logprobs of one training pass over it."""
    samples = {n: sample_of(*pair) for n, pair in enumerate(pairs)}
    limits = PackingLimits(max_tokens=8192, multiple=1, sample_multiple=1)
    batch = make_microbatch(samples, list(samples), limits, mesh.cp, torch.device("cpu"))
    head = LogprobHead(mesh, VOCAB, temperature=1.0, chunk_tokens=64)
    with torch.no_grad(), evaluating(chunks):
        (output,) = run_pass(chunks, [batch], head, backward=False)
    return batch, output["logprobs"]


def segments_of(prompt: Prompt, one: Completion) -> list[tuple[int, ...]]:
    tokens = prompt.tokens_T + one.tokens_T
    starts = [0, *(len(prompt.tokens_T) + start for start in one.segments), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(starts)]


def test_a_linear_agent_makes_the_samples_of_the_same_task_as_an_environment(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seeds of an environment's turns the tokens, logprobs, routes, turns and rewards are the same."""
    monkeypatch.setattr(Session, "next_seeds", lambda session, *_: [turn_seed(session.seed, len(session.calls))])
    config = config_of(theirs.ours, arguments={"turns": 3}, max_tokens=200)
    wanted = held(config, engine, folder, one_rank, SIX, with_routes=True)
    found = run_sessions(agent_config(theirs.ours, "echo"), engine, folder, one_rank, SIX, with_routes=True)
    num_compared = 0
    for group, other in zip(found, wanted, strict=True):
        for one, theirs_one in zip(group.completions, other.completions, strict=True):
            if theirs_one.episode.end != "done":
                continue  # a turn without an end goes on for an agent, which does not know why it ended
            assert one.tokens_T == theirs_one.tokens_T
            assert one.logprobs_T == pytest.approx(theirs_one.logprobs_T, abs=5e-6)
            assert one.episode.spans == theirs_one.episode.spans
            assert one.episode.reward == theirs_one.episode.reward == 3.0
            assert torch.equal(one.experts_TLK, theirs_one.experts_TLK)
            assert not one.segments
            num_compared += 1
    assert num_compared >= 3


def test_recorded_logprobs_and_routes_are_those_of_each_segment_alone(
    theirs: Oracle, chunks: list[nn.Module], engine: MegatronEngine, folder: Path, one_rank: Mesh
) -> None:
    """The agents compact and edit their history, ask in parallel, and draw several answers."""
    config = agent_config(theirs.ours, "forking", max_tokens=400)
    groups = run_sessions(config, engine, folder, one_rank, SIX[:3], with_routes=True)
    pairs = [(group.prompt, one) for group in groups for one in group.completions]
    assert all(one.episode.failure is None and one.episode.end == "done" for _, one in pairs), pairs[0][1].episode
    assert {len(one.episode.turns) for _, one in pairs} == {8}
    assert min(len(one.segments) for _, one in pairs) >= 5
    batch, logprobs_T = trained_logprobs(chunks, one_rank, pairs)
    assert (logprobs_T - batch.rollout_logprobs_T).abs()[batch.mask_T].max() < 1e-5
    assert int(batch.mask_T.sum()) == sum(one.num_sampled for _, one in pairs)
    for prompt, one in pairs:
        routes, before = one.experts_TLK, 0
        for tokens_T in segments_of(prompt, one):
            once = Sampling(max_new_tokens=1, with_routes=True)
            (again,) = engine.generate([dataclasses.replace(prompt, tokens_T=tokens_T[:-1])], once, [[0]])
            alone = again.completions[0].experts_TLK
            assert torch.equal(routes[before : before + len(alone)], alone)
            before += len(alone)
        assert before == len(routes)


FAULTS = {
    "silent": ("bad_reply", "failed"),
    "raise": ("raised", "failed"),
    "hang": ("timeout", "failed"),
    "die": ("died", "failed"),
    "kill": ("died", "failed"),
    "nan": ("not_finite", "failed"),
    "none": ("bad_reply", "failed"),
    "text": ("bad_reply", "failed"),
    "children": (None, "done"),
    "context": (None, "context"),
    "turns": (None, "turns"),
}


@pytest.mark.full
def test_an_agent_that_fails_has_no_reward_and_the_others_go_on(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path)}
    limits = {"max_tokens": 400, "max_calls": 12, "timeout_s": 10.0}
    config = agent_config(theirs.ours, "faulty", arguments=arguments, **limits)
    groups = run_sessions(config, engine, folder, one_rank, problems(*FAULTS), group_size=1)
    for (name, (kind, end)), group in zip(FAULTS.items(), groups, strict=True):
        (one,) = group.completions
        assert (None if one.episode.failure is None else one.episode.failure.kind) == kind, (name, one.episode.failure)
        assert one.episode.end == end, name
        assert one.is_truncated == (end in ("context", "turns")), name
        assert len(group.prompt.tokens_T) + len(one.tokens_T) <= 40 + 400
        assert one.episode.reward == (0.0 if kind else 1.0), name
    assert len(groups[-1].completions[0].episode.turns) == 12
    (pid_file,) = tmp_path.iterdir()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_program_asks_in_both_forms_and_fails_alone(
    theirs: Oracle,
    engine: MegatronEngine,
    folder: Path,
    one_rank: Mesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {
        "fine": (None, 1.5, ""),
        "children": (None, 1.0, ""),
        "three": ("raised", 0.0, f"ended with status 3: here {Path.cwd()}\nlast words"),
        "nan": ("not_finite", 0.0, "nan"),
        "list": ("bad_reply", 0.0, "[1]"),
        "no file": ("bad_reply", 0.0, "returned no reward"),
    }
    monkeypatch.setenv("SOME_SECRET", "of the run's user")
    (tmp_path / "program.py").write_text(PROGRAM)
    command, arguments = (sys.executable, str(tmp_path / "program.py")), {"folder": str(tmp_path)}
    config = agent_config(theirs.ours, "", command=command, arguments=arguments)
    groups = run_sessions(config, engine, folder, one_rank, problems(*wanted), group_size=1)
    for (name, (kind, reward, text)), group in zip(wanted.items(), groups, strict=True):
        (one,) = group.completions
        failure = one.episode.failure
        assert (failure and failure.kind) == kind, (name, failure)
        assert one.episode.reward == reward, name
        assert failure is None or text in failure.text, failure
        # The second request is the first one again, in another form: both are answers to one prompt.
        assert len(one.episode.turns) == 2 and len(one.segments) == 1, name
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_anthropics_form_is_the_same_history_in_other_words(
    theirs: Oracle, folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    (tmp_path / "tools.jinja").write_text(TOOLS)
    config = agent_config(theirs.ours, "anthropic", str(tmp_path / "tools.jinja"), max_tokens=2000)
    _, chat = chat_of(config, folder)
    calling = 'well <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    engine = Scripted(lambda asked: "<think>easy</think>end!" if "t:3" in asked else calling, chat)
    (group,) = run_sessions(config, engine, folder, one_rank, SIX[:1], group_size=1)
    (one,) = group.completions
    assert one.episode.failure is None, one.episode.failure
    assert len(one.episode.turns) == 2 and not one.segments
    text = f"[add ]s:calculate<end>u:go<end>a:{calling}<end>t:3<end>a:<think>easy</think>end!<end>"
    assert chat.decode(group.prompt.tokens_T + one.tokens_T) == text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ["hi"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"text": "no type"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": 3},
        {"messages": [], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"messages": [], "tool_choice": "auto"},
    ],
    ids=str,
)
def test_a_body_of_another_form_than_anthropics_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(RefusedError) as refused:
        chat_body(body)
    assert refused.value.status == 400


FORMS = {
    "hermes": ('<tool_call>\n{{ {"name": name, "arguments": given} | tojson }}\n</tool_call>', {"a": 1}),
    "xml": (
        "<tool_call>\n<function={{ name }}>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        {"a": "1"},
    ),
    "glm": ("<tool_call>{{ name }}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", {"a": "1"}),
    "mistral": ('[TOOL_CALLS] [{{ {"name": name, "arguments": given, "id": "abcdef012"} | tojson }}]', {"a": 1}),
    "deepseek": (
        "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>{{ name }}\n```json\n{{ given|tojson }}\n```"
        "<|tool_call_end|><|tool_calls_end|>",
        {"a": 1},
    ),
    "deepseek of 3.1": (
        "<|tool_calls_begin|><|tool_call_begin|>{{ name }}<|tool_sep|>{{ given|tojson }}<|tool_call_end|>"
        "<|tool_calls_end|>",
        {"a": 1},
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ number }}<|tool_call_argument_begin|>{{ given | tojson }}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        {"a": 1},
    ),
    "llama3": ('{{ {"name": name, "parameters": given} | tojson }}', {"a": 1}),
}
"""How the models' templates write a call, and its arguments as they are read."""


class Written:
    """A chat whose template shows the tools, then the last call, in a form; a token is a character."""

    turn_end_ids = ()

    def __init__(self, form: str) -> None:
        self.form, self.is_deepseek = form, "tool_sep" in form

    def prompt(self, conversation: Conversation) -> list[int]:
        (call,), (tool,) = conversation.messages[1]["tool_calls"], conversation.tools
        shown = json.dumps(tool) + '\n{"name": <function-name>, "arguments": <args-json-object>}<|eot|>assistant>\n\n'
        shown += self.call(call["id"], **call["function"])
        return [*map(ord, shown + ("<|eot_id|>" if "parameters" in self.form else "</s>") + "tool>")]

    def call(self, number: str, name: str, arguments: object) -> str:
        template = jinja2.Environment().from_string(self.form)
        text = template.render(number=number, name=name, given=arguments)
        # Its bars and blanks are letters of their own: U+FF5C and U+2581.
        return text.replace("|", chr(0xFF5C)).replace("_", chr(0x2581)) if self.is_deepseek else text

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_each_format_are_found_by_the_template_and_read(form: str) -> None:
    """Its name is not that of a tool, or its arguments are cut: then it stays text."""
    (written, arguments), kind = FORMS[form], form.split()[0]
    chat = Written(written)
    assert format_of(chat) == kind
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "mul")]
    text = chat.call("functions.add:0", "add", {"a": 1})
    message = message_of(text, tools, kind)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", arguments)
    assert message["content"] == ""
    assert kind != "kimi" or call["id"] == "functions.add:0"
    assert message_of(f"first {text}", tools, kind)["content"] == (f"first {text}" if kind == "llama3" else "first ")
    for wrong in (chat.call("functions.other:0", "other", {"a": 1}), text[: len(text) // 2]):
        assert message_of(wrong, tools, kind) == {"role": "assistant", "content": wrong}


@pytest.mark.full
def test_an_agent_that_fails_for_every_problem_ends_the_start(
    theirs: Oracle, folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    """It is answered with the reference answers, which it may take for calls of a tool or for the end."""
    config = agent_config(theirs.ours, "compacting")
    tokenizer, chat = chat_of(config, folder)
    tried = problems("abc", "")
    assert try_agent(config.rl, tried, chat, tokenizer, (END,)) == ()
    config = agent_config(theirs.ours, "faulty", arguments={"folder": str(tmp_path)}, timeout_s=20.0)
    (failed,) = try_agent(config.rl, problems("raise", "fine"), chat, tokenizer, (END,))
    assert (failed.failure.kind, failed.problem_id) == ("raised", "0")
    with pytest.raises(TrainingError, match="of a trial, before the start"):
        try_agent(config.rl, problems("raise", "none"), chat, tokenizer, (END,))


@pytest.mark.full
def test_processes_end_when_they_are_told_though_later_ones_hold_their_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked inherits the pipes to those before it, which therefore do not see that they close."""
    monkeypatch.setattr(workers, "PATIENCE_S", 20.0)
    pool = WorkerPool(abs, workers=4, timeout_s=60.0)
    assert pool.run([-1, -2, -3, -4]) == [1, 2, 3, 4]
    start_s = time.perf_counter()
    pool.close()
    assert time.perf_counter() - start_s < 20


def test_every_request_that_is_not_sampling_from_the_policy_is_refused_once(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    config = agent_config(theirs.ours, "probing", arguments={"folder": str(tmp_path)}, max_tokens=1000)
    (group,) = run_sessions(config, engine, folder, one_rank, SIX[:1], group_size=1)
    (one,) = group.completions
    assert one.episode.failure is None, one.episode.failure
    found = json.loads((tmp_path / "probed").read_text())
    for name, (_, _, _, status, word) in REQUESTS.items():
        got, text, _ = found[name]
        assert got == status, (name, text)
        if status != 200:
            error = json.loads(text)["error"]
            assert word in error["message"] or word in error["code"], (name, text)
    assert len(one.episode.turns) == sum(status == 200 for *_, status, _ in REQUESTS.values())
    ids = json.loads(found["ids"][1])
    (start, end) = one.episode.spans[-1]
    assert ids["prompt_token_ids"] == [3, 4]
    assert ids["choices"][0]["token_ids"] == [*one.tokens_T[start:end]]
    assert ids["choices"][0]["logprobs"]["token_logprobs"] == [*one.logprobs_T[start:end]]


@pytest.mark.full
def test_a_sampling_of_its_own_is_refused_where_that_is_asked_for(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path)}
    config = agent_config(theirs.ours, "probing", arguments=arguments, max_tokens=1000, sampling="refuse")
    run_sessions(config, engine, folder, one_rank, SIX[:1], group_size=1)
    found = json.loads((tmp_path / "probed").read_text())
    status, text, _ = found["another temperature"]
    assert status == 400
    assert "temperature" in text


@pytest.mark.full
def test_answers_are_recorded_once_and_only_if_they_were_read(
    theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh
) -> None:
    config = agent_config(theirs.ours, "repeating", max_tokens=1000)
    (group,) = run_sessions(config, engine, folder, one_rank, SIX[:1], group_size=1)
    (one,) = group.completions
    assert one.episode.failure is None, one.episode.failure
    # "once", "same" (once, or twice where the repeated one came first), and two of "twice".
    assert len(one.episode.turns) in (4, 5)
    said = "".join(chr(token + 31) for token in group.prompt.tokens_T + one.tokens_T)
    assert "lost" not in said


@pytest.mark.matrix("streaming")
@pytest.mark.parametrize("function", ["streaming", "patient"])
def test_agents_may_stream_and_be_async(
    function: str, theirs: Oracle, engine: MegatronEngine, folder: Path, one_rank: Mesh
) -> None:
    (group,) = run_sessions(agent_config(theirs.ours, function), engine, folder, one_rank, SIX[:1])
    assert [one.episode.failure for one in group.completions] == [None, None]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_every_call_of_a_random_tree_begins_a_segment_or_goes_on_and_is_trained_on_once(data, num_calls: int) -> None:
    """Few different tokens, so that prompts often begin with other calls by chance."""
    session = session_of(10_000)
    for n in range(num_calls):
        earlier = data.draw(st.sampled_from([(), *(call.tokens_T for call in session.calls)]))
        prompt_T = earlier + data.draw(TOKENS)
        tokens_T = data.draw(TOKENS)
        # The logprob names the token: call, then place.
        logprobs = tuple(-float(100 * n + t + 1) for t in range(len(tokens_T)))
        completion = dataclasses.replace(turn_of(tokens_T), logprobs_T=logprobs)
        session.record(Call(prompt_T=prompt_T, completion=completion, text=""))
    common = common_length([session])
    one = session.completion(common, "done")
    prompt = Prompt(problem=SIX[0].problem, tokens_T=session.paths()[0][0].prompt_T[:common])
    segments = segments_of(prompt, one)
    assert len(segments) == len(one.segments) + 1
    for call in session.calls:
        assert any(segment[: len(call.tokens_T)] == call.tokens_T for segment in segments)
    sampled = [logprob for start, end in one.sampled_spans for logprob in one.logprobs_T[start:end]]
    trained = [logprob for call in session.calls for logprob in call.completion.logprobs_T]
    assert sorted(sampled) == sorted(trained), "each once"
    # Each sampled token stands where its call has it: after its prompt, at the beginning of a segment.
    starts = [-len(prompt.tokens_T), *one.segments]
    for start, end in one.sampled_spans:
        n, t = divmod(-int(one.logprobs_T[start]) - 1, 100)
        begin = max(first for first in starts if first <= start)
        call = session.calls[n]
        assert (start - begin, t) == (len(call.prompt_T), 0)
        assert one.tokens_T[start:end] == call.completion.tokens_T
    assert segments[-1][: len(session.calls[-1].tokens_T)] == session.calls[-1].tokens_T, "the newest call is last"


def test_versions_of_a_session_are_those_of_its_calls_also_where_a_later_branch_began_with_older_weights() -> None:
    """The newest call of the first branch has newer weights than the second branch, which two versions sampled."""
    session = session_of(100)
    calls = [((1, 2), (3, 4), 5), ((9,), (8, 8, 8), 5), ((1, 2, 3, 4, 6), (7,), 7), ((9, 8, 8, 8, 1), (2, 2), 6)]
    for prompt_T, tokens_T, version in calls:
        one = dataclasses.replace(turn_of(tokens_T), versions=single_version(version, len(tokens_T)))
        session.record(Call(prompt_T=prompt_T, completion=one, text=""))
    # By chance it begins with an answer of newer weights, which it therefore cannot have read.
    late = dataclasses.replace(turn_of((4,)), versions=single_version(6, 1))
    session.record(Call(prompt_T=(1, 2, 3, 4, 6, 7, 7), completion=late, text=""))
    one = session.completion(2, "done")
    assert one.tokens_T == (3, 4, 6, 7, 9, 8, 8, 8, 1, 2, 2, 1, 2, 3, 4, 6, 7, 7, 4)
    assert one.segments == (4, 11)
    assert [(span.version, span.start, span.end) for span in one.versions] == [
        *[(7, 0, 4), (5, 4, 8), (6, 8, 11), (5, 11, 15), (6, 15, 19)]
    ]
    assert one.policy_version == 5
    assert one.stale_spans(7) == ((4, 11), (11, 19))


def session_of(max_tokens: int, multiple: int = 1) -> Session:
    return Session(index=0, prompt=SIX[0], seed=1, key="sk", max_tokens=max_tokens, multiple=multiple)


@pytest.mark.parametrize(("multiple", "wanted"), [(1, 17), (8, 10)])
def test_the_room_of_a_call_is_what_other_branches_leave(multiple: int, wanted: int) -> None:
    """A branch has 9 of the 30 tokens, and the request extends another branch, which ends at 4 of its tokens."""
    session = session_of(32 if multiple == 8 else 30, multiple)
    for prompt_T, tokens_T in (((1, 2), (3, 4)), ((5, 5, 5, 5), (6, 6, 6, 6, 6))):
        session.record(Call(prompt_T=prompt_T, completion=turn_of(tokens_T), text=""))
    # 30 - 9 - 4; with a multiple, 32 less 16 for the branch of 9, and the rest is for a segment of 16.
    assert session.room((1, 2, 3, 4), 1) == (wanted if multiple == 1 else 12)
    assert session.room((1, 2, 3, 4, 7, 8), 2) == (4 if multiple == 1 else 2)
    session.open[0] = (8, 1)
    assert session.room((1, 2, 3, 4), 1) == (9 if multiple == 1 else 4)


@pytest.mark.parametrize("forks", [False, True])
def test_a_call_costs_no_more_after_many_calls_than_its_own_history(
    forks: bool, theirs: Oracle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts what a request looks at: its own messages, and of the calls before it those that it may continue."""
    tokenizer, chat = chat_of(agent_config(theirs.ours, ""), folder)
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: counts.update([name]) or function(*args)

    monkeypatch.setattr(Call, "begins", counted("begins", Call.begins))
    monkeypatch.setattr(session_module, "identity", counted("identity", identity))
    decode = counted("decode", chat.decode)
    session, messages, looked_at = session_of(10**6), [user("go")], []
    for n in range(30):
        counts.clear()
        prompt_T, raw, keys = session.chat_prompt(chat, messages, (), frozenset())
        session.room(prompt_T, 1)
        session.text_prompt("another", decode, tokenizer.encode)
        answer = {"role": "assistant", "content": f"a{n}"}
        one = turn_of((*tokenizer.encode(f"a{n}"), END))
        said = {"messages": (*messages, answer), "raw": (*raw, answer), "keys": (*keys, identity(answer))}
        session.record(Call(prompt_T=prompt_T, completion=one, text="", **said))
        assert counts["identity"] == len(messages) and counts["decode"] == min(n, 1)
        looked_at.append(counts["begins"])
        messages = [user(f"other {n}")] if forks else [*messages, answer, user("more")]
    # The newest call for the room, and once more to continue it; of branches each, as any of them may be continued.
    assert looked_at == ([2 * n for n in range(30)] if forks else [0, *[2] * 29])
    assert len(session.paths()) == (30 if forks else 1)


@pytest.mark.full
def test_twelve_turns_with_two_tools_and_another_agent_are_one_history_and_one_branch(
    theirs: Oracle, chunks: list[nn.Module], folder: Path, one_rank: Mesh, tmp_path: Path
) -> None:
    """The turns are a script's; their logprobs are the model's, of a pass for each answer. With MCORE_RL_FIGURES the
    transcript is written there: bench/results/agent_transcript.json.
    """
    (tmp_path / "tools.jinja").write_text(TOOLS)
    config = agent_config(theirs.ours, "tooled", str(tmp_path / "tools.jinja"), max_tokens=5000, max_calls=20)
    _, chat = chat_of(config, folder)
    engine = Scripted(script, chat, ModelAnswers(chunks, one_rank, theirs.ours, theirs.tensors).score)
    rl = config.rl.model_copy(update={"rollout": config.rl.rollout.model_copy(update={"max_new_tokens": 90})})
    config = config.model_copy(update={"rl": rl})
    (group,) = run_sessions(config, engine, folder, one_rank, SIX[:1], group_size=1)
    (one,) = group.completions
    assert one.episode.failure is None, one.episode.failure
    assert one.episode.reward == sum((n + 2) if n % 2 else 3 * n for n in range(1, 12) if n != 7)
    assert len(one.episode.turns) == 13
    first, last = (chat.decode(tokens_T) for tokens_T in segments_of(group.prompt, one))
    assert (first.startswith("s:") and first.endswith("sub<end>")) or last.startswith("[add mul ]")
    history = last if last.startswith("[") else first
    # The history is what the policy wrote, with what the template adds: nothing was written anew.
    assert history == engine.prompts[-1] + "<think>done?</think>end<end>"
    assert history.count("well <tool_call>") == 10
    assert history.count("t:3<end>") == 1, "the tool's result of 1 + 2"
    roles = [message["role"] for message in one.episode.messages]
    assert roles == ["user", *["assistant", "tool"] * 6, "assistant", "user", *["assistant", "tool"] * 4, "assistant"]
    batch, logprobs_T = trained_logprobs(chunks, one_rank, [(group.prompt, one)])
    apart_T = (logprobs_T - batch.rollout_logprobs_T).abs()[batch.mask_T]
    assert len(apart_T) == one.num_sampled and apart_T.max() < 1e-5
    if path := os.environ.get("MCORE_RL_FIGURES"):
        starts = [0, *(len(group.prompt.tokens_T) + start for start in one.segments)]
        sampled = [(start, end, chat.decode(one.tokens_T[start:end])) for start, end in one.episode.spans]
        figures = {
            "command": "MCORE_RL_FIGURES=bench/results/agent_transcript.json pytest "
            "tests/unit/rl/environments/test_agents.py -k twelve",
            "messages": one.episode.messages,
            "segments": [
                {"first_token": start, "text": chat.decode(tokens_T)}
                for start, tokens_T in zip(starts, segments_of(group.prompt, one), strict=True)
            ],
            "sampled": [
                {"start": start, "end": end, "text": text, "logprob_sum": round(sum(one.logprobs_T[start:end]), 4)}
                for start, end, text in sampled
            ],
            "num_sampled": one.num_sampled,
            "largest_difference_to_a_training_pass_nats": float(apart_T.max()),
        }
        Path(__file__).parents[4].joinpath(path).write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.full
def test_sixty_four_sessions_of_twenty_calls_lose_nothing(theirs: Oracle, folder: Path, one_rank: Mesh) -> None:
    config = agent_config(
        theirs.ours, "calling", sessions=64, max_tokens=4000, timeout_s=280.0, arguments={"calls": 20}
    )
    _, chat = chat_of(config, folder)
    groups = run_sessions(config, Scripted(lambda _: "fine", chat), folder, one_rank, problems(*"a" * 64), group_size=1)
    assert [one.episode.failure for group in groups for one in group.completions] == [None] * 64
    assert {len(one.episode.turns) for group in groups for one in group.completions} == {20}
    assert not any(one.segments for group in groups for one in group.completions)


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_a_template_of_channels_is_refused_before_an_agent_runs(theirs: Oracle, tool_format: str) -> None:
    """Gpt-oss's template writes a call as a message to the channel `commentary`, after one to `analysis`."""
    chat = Written(
        "<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>{{ given | tojson }}<|call|>"
    )
    rl = agent_config(theirs.ours, "echo", tool_format=tool_format).rl
    with pytest.raises(ConfigError, match=r'gpt-oss.*data.chat_template.*hermes.*"plain"'):
        try_agent(rl, problems("a"), chat, SimpleNamespace(vocab_size=48, decode=str), ())
