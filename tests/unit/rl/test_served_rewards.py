"""Rewards from servers: batches, repetitions, failures by policy; answers come from the standard library's server."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.rl.rollout import JudgeConfig, RewardConfig, RewardServerConfig
from mcore_rl.errors import ConfigError, TrainingError
from mcore_rl.metrics.metrics import reduced
from mcore_rl.rl.rewards.interface import TextStep
from mcore_rl.rl.rewards.score import Reward, Scores, refuse_failing_parts, try_reward
from mcore_rl.rl.types import Group
from tests.unit.rl.groups import text_group

QUICK = {"retry_s": 0.001, "timeout_s": 5.0}


class Server:
    """Answers each request by a function of its body and its number, and records what it was sent."""

    def __init__(self) -> None:
        self.reply: Callable[[Any, int], tuple[int, Any]] = lambda body, number: (500, {})
        self.requests: list[tuple[str, Any, str | None]] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append((self.path, body, self.headers["Authorization"]))
                    number = len(outer.requests)
                status, answer = outer.reply(body, number)
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def group(*texts: str) -> Group:
    return text_group("5", *texts, prompt="2+3=", level=1)


def scored(config: RewardConfig, *texts: str) -> Scores:
    with Reward(config, max_new_tokens=8) as reward:
        return reward([group(*texts)])


def tried(config: RewardConfig) -> object:
    return try_reward(config, 8, [group("5").prompt] * 2, lambda text: [1] * len(text))


def test_batches_come_back_in_order_in_every_form_of_a_score(server: Server) -> None:
    forms: dict[str, Any] = {
        "a": 0.5,
        "bb": [2, "good"],
        "ccc": {"score": 3, "why": "long"},
        "dddd": [[2, 1.0], [4, 0.25]],
        "e": None,
        "f": float("nan"),
        "g": "one",
    }
    server.reply = lambda body, _: (200, {"scores": [forms[one["completion"]] for one in body["samples"]]})
    part = f"{server.url}/score"
    config = RewardConfig(parts=("exact", part), correct=part, server=RewardServerConfig(batch_size=3, **QUICK))
    scores = scored(config, *forms)
    assert scores.parts[part][0].tolist()[:4] == [0.5, 2.0, 3.0, 1.25]
    assert scores.parts[part][0].isnan().tolist() == [False] * 4 + [True] * 3
    assert scores.steps_PG[0][3] == (TextStep(2, 1.0), TextStep(4, 0.25))
    assert [reasons.get(part) for reasons in scores.reasons_PG[0][:3]] == [None, "good", "why: long"]
    # None: the part does not apply, and the other one is the reward.
    assert scores.rewards_PG[0, 4].item() == scores.parts["exact"][0, 4].item()
    assert [failed.failure.kind for failed in scores.failures] == ["not_finite", "raised"]
    assert scores.correct_PG is not None and scores.correct_PG[0].tolist()[:4] == [0, 1, 1, 1]
    assert sorted(len(body["samples"]) for _, body, _ in server.requests) == [1, 3, 3]
    assert {path for path, _, _ in server.requests} == {"/score"}
    sample = next(one for _, body, _ in server.requests for one in body["samples"] if one["completion"] == "bb")
    assert sample == {
        "prompt": "2+3=",
        "completion": "bb",
        "answer": "5",
        "num_tokens": 2,
        "is_truncated": False,
        "fields": {"level": 1},
        "messages": [],
    }


@pytest.mark.matrix("replies0-3-None")
@pytest.mark.parametrize(
    ("replies", "num_requests", "reason"),
    [
        ([(503, {}), (200, b"not json"), (200, {"scores": [1.0, 2.0]})], 3, None),
        ([(200, {"scores": [1.0]}), (429, {}), (200, {"scores": [1.0, 2.0]})], 3, None),
        ([(500, {"error": "full"})] * 3, 3, "status 500"),
        ([(200, {"points": 1})] * 3, 3, "the answer to 2 samples is {'points': 1}"),
        # What is wrong with the request is not mended by asking again.
        ([(401, {"error": "who?"})], 1, "status 401"),
    ],
)
def test_a_request_is_repeated_and_then_its_scores_have_failed(server, replies, num_requests, reason):
    server.reply = lambda _, number: replies[number - 1]
    config = RewardConfig(parts=(server.url,), server=RewardServerConfig(retries=2, **QUICK))
    scores = scored(config, "a", "b")
    assert len(server.requests) == num_requests
    if reason is None:
        assert scores.rewards_PG.tolist() == [[1.0, 2.0]]
        return
    assert scores.rewards_PG.isnan().all()
    assert [failed.failure.error for failed in scores.failures] == ["ServerError"] * 2
    assert reason in scores.failures[0].failure.text
    counted = reduced(scores.metrics())
    assert (counted["reward/errors_raised"], counted["reward/unscored_completions"]) == (2, 2)


@pytest.mark.full
def test_a_server_that_goes_down_in_the_middle_is_counted_by_policy_and_costs_its_waiting_once(server: Server) -> None:
    server.reply = lambda body, _: (200, {"scores": [1.0] * len(body["samples"])})
    settings = RewardServerConfig(batch_size=1, concurrency=1, retries=3, **QUICK)
    config = RewardConfig(parts=("exact", server.url), error_value=-1.0, server=settings)
    with Reward(config, max_new_tokens=8) as reward:
        before = reward([group("5", "6")])
        server.reply = lambda _, number: (503, {})
        server.requests.clear()
        after = reward([group("5", "6", "7")])
    assert before.rewards_PG.tolist() == [[2.0, 1.0]]
    assert after.rewards_PG.tolist() == [[0.0, -1.0, -1.0]]
    assert len(server.requests) == 4 + 1 + 1
    with pytest.raises(TrainingError, match=r"failed for 3 of 3 completions"):
        refuse_failing_parts({server.url: 3}, 3, after.failures, 0.9)


@pytest.mark.matrix("0.9")
@pytest.mark.parametrize("max_failed_fraction", [0.9, 1.0])
def test_a_server_that_is_down_at_the_start_is_refused_before_work(server: Server, max_failed_fraction: float) -> None:
    url = f"{server.url}/score"
    server.close()
    settings = RewardServerConfig(retries=1, **QUICK)
    config = RewardConfig(parts=("exact", url), max_failed_fraction=max_failed_fraction, server=settings)
    with pytest.raises(TrainingError) as caught:
        tried(config)
    message = str(caught.value)
    assert f'rl.reward.parts "{url}" gave no score for any of 4 reference answers, before the start' in message
    assert "Connection refused" in message and "Start the server" in message


@pytest.mark.full
def test_a_key_comes_from_the_environment_and_is_needed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply = lambda body, _: (200, {"scores": [1.0] * len(body["samples"])})
    settings = RewardServerConfig(api_key_env="MY_REWARD_KEY", **QUICK)
    config = RewardConfig(parts=(server.url,), server=settings)
    monkeypatch.delenv("MY_REWARD_KEY", raising=False)
    with pytest.raises(ConfigError, match=r'api_key_env="MY_REWARD_KEY", and this variable is not set'):
        scored(config, "a")
    monkeypatch.setenv("MY_REWARD_KEY", "secret")
    assert scored(config, "a").rewards_PG.tolist() == [[1.0]]
    assert server.requests[0][2] == "Bearer secret"
    assert "secret" not in config.model_dump_json()


def judged_by(server: Server, template: Path, **judge: Any) -> RewardConfig:
    """The config of a reward by a judge at the server, which is asked with this template."""
    settings = JudgeConfig(url=f"{server.url}/v1", model="big", **judge)
    return RewardConfig(parts=(f"judge:{template}",), judge=settings, server=RewardServerConfig(**QUICK))


def says(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_is_asked_by_a_template_and_its_last_score_counts(server, tmp_path):
    template = tmp_path / "judge.jinja"
    template.write_text("Question: {{ prompt }} Answer: {{ completion }} of level {{ fields.level }}. Score 0 to 10?")
    said = "Score: 3. On reflection: score **7.5**"
    server.reply = lambda body, _: says("no idea" if "bad" in body["messages"][0]["content"] else said)
    scores = scored(judged_by(server, template, scale=10.0, max_tokens=32), "5", "bad")
    assert scores.rewards_PG[0, 0].item() == 0.75
    assert scores.reasons_PG[0][0] == {f"judge:{template}": said}
    assert scores.correct_part is None
    (failed,) = scores.failures
    assert failed.failure.text == "no score in the judge's answer: 'no idea'"
    path, body, _ = min(server.requests, key=lambda one: len(one[1]["messages"][0]["content"]))
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "big",
        "messages": [{"role": "user", "content": "Question: 2+3= Answer: 5 of level 1. Score 0 to 10?"}],
        "temperature": 0.0,
        "max_tokens": 32,
    }


JUDGED: dict[str, float | str] = {
    "Score: 7": 7, "Score: -3": -3, "Score: \N{MINUS SIGN}3": -3, "score = -0.5": -0.5, "Score: .5": 0.5,
    "Score: 1e-1": 0.1, "Score: 1,000": 1000, "Score: 3 1/2": 3.5, "Score: 10.": 10, "Score: 08": 8,
    "**Score:** **7/10**": 7, "Score 9 of 10": 9, "Score (0-10): 7": 7, "Score (out of 10): 7": 7,
    "Final score - 4": 4, "Scores: 4": 4, '{"final_score": 7}': 7, "Score for clarity: 3\nScore: 9": 9,
    "Score: 3 - could be 5. Score: 4": 4, "I would score 2 points for this. Total: 8": 8,
    "Score: 7. A score of 5 is average": 7, "Score: 9\n- 3 facts are right": 9, "The score: nine": "no score",
    "Score (10 at most): none": "no score", "Score: 7-8": "no single number for the score 'Score: 7'",
    "Score: 7 or 8": "no single number", "Score: 7,5": "no single number", "Score: 1.2.3": "no single number",
    "Score: 1e999": "no single number",
}  # fmt: skip
"""Answers of a judge -> the score, or the beginning of the reason why it has failed."""


@pytest.mark.full
def test_a_score_of_a_judge_is_read_whole_or_has_failed(server, tmp_path):
    (tmp_path / "judge.jinja").write_text("{{ completion }}")
    server.reply = lambda body, _: says(body["messages"][0]["content"])
    scores = scored(judged_by(server, tmp_path / "judge.jinja"), *JUDGED)
    failed = {one.scored.completion: one.failure.text for one in scores.failures}
    assert reduced(scores.metrics())["reward/errors_raised"] == len(failed)
    for (answer, wanted), score in zip(JUDGED.items(), scores.rewards_PG[0].tolist(), strict=True):
        if isinstance(wanted, str):
            assert failed[answer].startswith(wanted)
        else:
            assert answer not in failed and score == wanted


@pytest.mark.full
def test_the_number_of_a_score_is_whole_where_a_pattern_takes_a_part_of_it(server, tmp_path):
    (tmp_path / "judge.jinja").write_text("Rate it.")
    server.reply = lambda _, __: says("Rating: [-2.5]")
    config = judged_by(server, tmp_path / "judge.jinja", score_pattern=r"Rating:\W*(\d+)")
    assert scored(config, "5").rewards_PG.tolist() == [[-2.5]]


def test_a_template_that_cannot_be_read_is_refused_and_one_that_names_too_much_fails(server, tmp_path):
    template = tmp_path / "judge.jinja"
    config = judged_by(server, template)
    template.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"the template cannot be read"):
        scored(config, "5")
    for text in ("{{ wrong_name }}", "{{ prompt.__class__.__mro__ }}"):
        template.write_text(text)
        with pytest.raises(TrainingError, match=r"gave no score for any of 4 reference answers.*template"):
            tried(config)
    assert not server.requests
