"""Teachers on servers: their numbers lie at the right tokens, and one that is missing never counts as 0."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.loss import DistillConfig, TeacherServerConfig
from mcore_rl.data.packing import PackingLimits
from mcore_rl.data.tokenizer import HuggingFaceTokenizer
from mcore_rl.errors import ConfigError, EngineError, StoppedError
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.rl.batch import LogprobHead, make_microbatch
from mcore_rl.rl.models import served_teachers
from mcore_rl.rl.models.served_teachers import ServedTeachers, probed_teacher
from mcore_rl.rl.rewards.score import Scores
from mcore_rl.rl.types import Group, TrainedSample
from tests.fake_server import GENERATE, FakeServer, TableAnswers
from tests.generating import prompt_of
from tests.tokenizer_files import save_tokenizer
from tests.unit.rl.groups import completion_of
from tests.unit.rl.step.test_batch import ALONE, CPU, SAMPLES

MODEL = ModelConfig(vocab_size=64)
WORDS = [f"w{index}" for index in range(64)]


class Telling(TableAnswers):
    """Logprobs that tell a token and its place: -(place + token / 100); the likeliest ids begin at the place."""

    def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
        return [
            {place + k: -0.01 * (k + 1) for k in range(top)} | {token: -(place + token / 100)}
            for place, token in enumerate(tokens[1:], start=1)
        ]


def distill_of(*servers: FakeServer, **fields: object) -> DistillConfig:
    server = TeacherServerConfig(kind=servers[0].kind, request_timeout_s=1.0, timeout_s=1.0)
    return DistillConfig(**{"teacher": servers[0].url, "server": server} | fields)


def never() -> bool:
    return False


def answered(distill: DistillConfig, *groups: Group) -> list[list[torch.Tensor | None]]:
    teachers = ServedTeachers(distill, MODEL, never)
    try:
        return teachers.answers(teachers.ask(groups))
    finally:
        teachers.close()


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with FakeServer(Telling(), request.param) as found:
        yield found


def test_a_teachers_numbers_are_of_each_token_of_a_completion_and_begin_anew_in_its_segments(
    server: FakeServer,
) -> None:
    """Two segments: the second is a text of its own, whose first token nothing predicts."""
    completion = replace(completion_of("", (40, 41, 42, 43, 44)), segments=(2,))
    group = Group(prompt=prompt_of((30, 31)), completions=(completion,))
    ((plain_CW,),) = answered(distill_of(server), group)
    assert plain_CW is not None and plain_CW.shape == (5, 1) and plain_CW[2].isnan()
    wanted = [-2.40, -3.41, -1.43, -2.44]
    assert plain_CW[[0, 1, 3, 4], 0].tolist() == pytest.approx(wanted)
    asked = server.bodies(GENERATE[server.kind])
    texts = [body.get("token_ids") or body.get("input_ids") for body in asked]
    assert sorted(texts) == [[30, 31, 40, 41], [42, 43, 44]]
    if server.kind == "sglang":
        assert sorted(body["logprob_start_len"] for body in asked) == [0, 1], "the prompt may come from the cache"

    ((top_CW,),) = answered(distill_of(server, forward_weight=0.5, top_k=3), group)
    assert top_CW is not None and top_CW.shape == (5, 7)
    assert top_CW[[0, 1, 3, 4], 0].tolist() == pytest.approx(wanted)
    assert top_CW[1].tolist() == pytest.approx([-3.41, 3, 4, 5, -0.01, -0.02, -0.03])


def test_each_prompt_is_asked_of_the_teacher_of_its_tag_and_none_is_asked_of_the_trainers(server: FakeServer) -> None:
    def tagged(tag: str) -> Group:
        prompt = prompt_of((30,), tag)
        problem = replace(prompt.problem, fields={"teacher": tag})
        return Group(prompt=replace(prompt, problem=problem), completions=(completion_of("", (40, 41)),))

    with FakeServer(TableAnswers(), server.kind) as other:
        distill = distill_of(server, teacher=None, teachers={"a": server.url, "b": other.url, "c": "runs/c"})
        ((of_a,), (of_b,), (of_c,)) = answered(distill, tagged("a"), tagged("b"), tagged("c"))
    assert of_a is not None and of_b is not None and of_c is not None
    assert of_a.flatten().tolist() == pytest.approx([-1.40, -2.41])
    assert of_b.flatten().tolist() == pytest.approx([-math.log(64)] * 2)
    assert of_c.isnan().all()
    assert len(server.calls) == len(other.calls) == 1


ONE = Group(prompt=prompt_of((30, 31)), completions=(completion_of("", (40, 41)), completion_of("", (42,))))


@pytest.mark.matrix("vllm-null_logprob", "sglang-not_json")
@pytest.mark.parametrize("fault", ["null_logprob", "cut_short", "status_500", "not_json", "close", "hang"])
def test_an_answer_that_is_missing_or_short_is_asked_for_again_and_then_ends_the_run(
    fault: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_teachers, "FIRST_PAUSE_S", 0.05)
    distill = distill_of(server)
    server.faults = [("probe", fault)]
    patient = distill.model_copy(update={"server": distill.server.model_copy(update={"timeout_s": 9})})
    teachers = ServedTeachers(patient, MODEL, never)
    (answers,) = teachers.answers(teachers.ask([ONE]))
    wanted = [pytest.approx([-2.40, -3.41]), pytest.approx([-2.42])]
    assert [answer.flatten().tolist() for answer in answers if answer is not None] == wanted
    assert teachers.take_retries() == 1 and teachers.take_retries() == 0
    teachers.close()
    server.faults = [("probe", f"always {fault}")]
    with pytest.raises(EngineError, match=r"none counts as 0"):
        answered(distill_of(server), ONE)


def test_a_completion_that_the_teacher_refuses_leaves_the_loss_and_a_teacher_that_refuses_all_ends_the_run(
    server: FakeServer,
) -> None:
    server.max_len = 4  # one token of an answer is asked for too
    ((refused, taught),) = answered(distill_of(server), ONE)
    assert refused is None and taught is not None
    teachers = ServedTeachers(distill_of(server), MODEL, never)
    group = teachers.added(ONE, (refused, taught))
    assert group.completions[0].teacher_CW.isnan().all() and not group.completions[1].teacher_CW.isnan().any()
    rewards_PG = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    scores = Scores(
        rewards_PG=rewards_PG, parts={}, steps_PG=[[(), ()]], reasons_PG=[[{}, {}]], failures=(), correct_part=None
    )
    scores.leave_out([[True, False]])
    assert scores.rewards_PG[0].isnan().tolist() == [True, False]
    server.max_len = 3
    with pytest.raises(EngineError, match=r"all 2 completions were refused"):
        answered(distill_of(server), ONE)
    server.api_key = "another"
    with pytest.raises(EngineError, match=r"status 401"):
        answered(distill_of(server, server=TeacherServerConfig(kind=server.kind, timeout_s=600)), ONE)


def test_a_wait_for_a_teacher_ends_when_the_run_is_to_stop(server: FakeServer) -> None:
    server.faults = [("probe", "always hang")]
    asked, hung = threading.Event(), threading.Event()
    server.on_hang = lambda path: hung.set()
    config = TeacherServerConfig(kind=server.kind, request_timeout_s=600, timeout_s=600)
    teachers = ServedTeachers(distill_of(server, server=config), MODEL, asked.is_set)
    futures = teachers.ask([ONE])
    assert hung.wait(10)
    asked.set()
    start_s = time.monotonic()
    with pytest.raises(StoppedError):
        teachers.answers(futures)
    assert time.monotonic() - start_s < 5
    for future in futures[0]:
        with pytest.raises(BaseException):  # noqa: B017  # stopped, or never begun
            future.result(5)


def tokenizer_of(folder: Path, words: list[str]) -> HuggingFaceTokenizer:
    save_tokenizer(folder, words, words[0], [words[-1]], eos_token=words[-1])
    return HuggingFaceTokenizer(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> HuggingFaceTokenizer:
    return tokenizer_of(tmp_path / "own", WORDS)


def probe(server: FakeServer, tokenizer: HuggingFaceTokenizer, **fields: object) -> str:
    return probed_teacher(server.url, distill_of(server, **fields), MODEL, tokenizer, longest_sample=50)


@pytest.mark.matrix("vllm")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_teacher_is_probed_before_the_run_and_refused_with_the_reason(
    kind: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    with FakeServer(TableAnswers(), kind, tokenizer=tokenizer, model_name="big", max_len=51) as server:
        assert probe(server, tokenizer) == "big (big)"
        server.max_len = 50
        with pytest.raises(ConfigError, match=r"holds 50 tokens.*and one token of an answer"):
            probe(server, tokenizer)
        server.max_len = 51
        for words in ([*WORDS[:40], "other", *WORDS[41:]], [*WORDS[:63], "w64"]):
            server.tokenizer = tokenizer_of(tmp_path / words[-1], words)
            with pytest.raises(ConfigError, match=r"has another tokenizer than data.tokenizer.path names: the id"):
                probe(server, tokenizer)
        server.tokenizer = None
        with pytest.raises(ConfigError, match=r"cannot be compared.*Start it with its tokenizer"):
            probe(server, tokenizer)
        server.tokenizer = tokenizer
        server.scales = -1.0  # logits
        with pytest.raises(EngineError, match=r"gives no logprobs of a text: .* is no logprob"):
            probe(server, tokenizer)
        server.scales = 0.5  # negative logits, or a temperature: 20 ids have 20 / 8
        with pytest.raises(EngineError, match=r"20 likeliest tokens have a probability of 2.5 together"):
            probe(server, tokenizer)
        server.scales = 1.5  # a temperature with which the mass is below 1
        with pytest.raises(EngineError, match=r"of a token that it chooses, .* nats in the mean"):
            probe(server, tokenizer)
        server.scales = 1.0
        if kind == "vllm":
            with pytest.raises(EngineError, match=r"greater than max allowed.*--max-logprobs"):
                probe(server, tokenizer, forward_weight=0.5, top_k=30)


def test_a_teachers_tokenizer_that_is_named_is_compared_in_all_ids_before_its_server_is_asked(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """Each of the others differs in one id, or in which ids are special; a further id may pad the vocabulary."""
    cases = {
        "renamed": ([*WORDS[:40], "other", *WORDS[41:]], WORDS[63:], "the id 40"),
        "swapped": ([*WORDS[:7], "w8", "w7", *WORDS[9:]], WORDS[63:], "the id 7"),
        "fewer": (WORDS[:60], WORDS[59:60], "the id 59"),
        "special": (WORDS, WORDS[62:], "the id 62"),
        "pieces": ([*WORDS[:62], "1234", "w63"], WORDS[63:], "the text"),
        "same": ([*WORDS, "w64"], WORDS[63:], None),
    }
    with FakeServer(TableAnswers(), tokenizer=None, model_name="big") as server:
        for name, (words, special, named) in cases.items():
            save_tokenizer(tmp_path / name, words, words[0], special, eos_token=words[-1])
            distill = distill_of(server, tokenizer=TokenizerConfig(path=str(tmp_path / name)))
            if named is None:
                assert probed_teacher(server.url, distill, MODEL, tokenizer, longest_sample=50) == "big (big)"
                continue
            with pytest.raises(ConfigError, match=rf"by rl.distill.tokenizer, has another.*: {named}\b"):
                probed_teacher(server.url, distill, MODEL, tokenizer, longest_sample=50)
            assert not server.calls


def test_a_teacher_that_answers_otherwise_each_time_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    class Moody(TableAnswers):
        num_asked = 0

        def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
            self.num_asked += 1
            return [
                {token: value - self.num_asked % 2 for token, value in one.items()}
                for one in super().score(tokens, top)
            ]

    with (
        FakeServer(Moody(), tokenizer=tokenizer) as server,
        pytest.raises(EngineError, match=r"differ, asked twice, by 1 nats"),
    ):
        probe(server, tokenizer)


def with_teacher(width: int) -> dict[int, TrainedSample]:
    """Samples whose teacher's numbers tell the token of their row and their column."""
    return {
        index: replace(
            sample, teacher_CW=-sample.rollout_logprobs_C[:, None] - 0.01 * torch.arange(width, dtype=torch.float32)
        )
        for index, sample in SAMPLES.items()
    }


def test_a_teachers_numbers_lie_where_their_tokens_are_predicted_on_context_parallel_ranks_too() -> None:
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=4)
    samples, found = with_teacher(3), []
    for axis in (ALONE, Axis(None, 0, 2), Axis(None, 1, 2)):
        batch = make_microbatch(samples, [8, 3], limits, axis, CPU)
        labels = batch.inputs.labels_Bs[0][batch.mask_T].tolist()
        found.append(sorted(zip(labels, batch.teacher_TW[batch.mask_T].tolist(), strict=True)))
        assert not batch.teacher_TW[~batch.completion_mask_T].any()
    whole, first, second = found
    assert whole == sorted(first + second)
    for label, row_W in whole:
        assert row_W == pytest.approx([label, label - 0.01, label - 0.02])
    assert make_microbatch({}, [], limits, ALONE, CPU).teacher_TW is None


def test_the_forward_kl_of_context_parallel_ranks_is_that_of_the_whole_and_of_autograd(one_rank: Mesh) -> None:
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=4)
    generator = torch.Generator().manual_seed(0)
    samples = {}
    for index, sample in SAMPLES.items():
        logprobs_CK, ids_CK = (
            torch.randn(len(sample.rollout_logprobs_C), 30, generator=generator).log_softmax(-1).topk(4)
        )
        numbers_CW = torch.cat([torch.zeros(len(ids_CK), 1), ids_CK.float(), logprobs_CK], dim=1)
        samples[index] = replace(sample, teacher_CW=numbers_CW)
    logits_1TV = torch.randn(1, 8, 32, generator=generator, dtype=torch.float64)
    head = LogprobHead(one_rank, 30, temperature=1.0, chunk_tokens=2)
    parts = []
    for places, axis in ((list(range(8)), ALONE), ([0, 3, 4, 7], Axis(None, 0, 2)), ([1, 2, 5, 6], Axis(None, 1, 2))):
        batch = make_microbatch(samples, [3, 8], limits, axis, CPU)
        part_1TV = logits_1TV[:, places].clone().requires_grad_()
        kl_T = head.teacher_forward_kl(batch, part_1TV)
        assert kl_T is not None
        kl_T.sum().backward()
        parts.append((places, kl_T.detach(), part_1TV.grad[0]))
        if axis is ALONE:
            leaf_TV = logits_1TV[0].clone().requires_grad_()
            ids_TK, q_TK = batch.teacher_TW[:, 1:5].long(), batch.teacher_TW[:, 5:].double().exp()
            p_TK = leaf_TV[:, :30].softmax(-1).gather(1, ids_TK)
            q_rest, p_rest = 1 - q_TK.sum(-1), 1 - p_TK.sum(-1)
            wanted_T = (q_TK * (q_TK / p_TK).log()).sum(-1) + q_rest * (q_rest / p_rest).log()
            wanted_T = wanted_T.where(batch.mask_T, 0.0)
            wanted_T.sum().backward()
    for places, kl_T, gradient_TV in parts:
        torch.testing.assert_close(kl_T, wanted_T.detach()[places], rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient_TV, leaf_TV.grad[places], rtol=0, atol=1e-6)
