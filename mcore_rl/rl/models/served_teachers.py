"""Teachers on inference servers: logprobs of the student's completions, asked for beside their rewards."""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import exp
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.loss import DistillConfig
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import ConfigError, EngineError, McoreRlError, StoppedError
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.probe import FEWEST, MOST_MEAN, probe_sequences
from mcore_rl.rl.engines.served import STOP_LOOK_S
from mcore_rl.rl.engines.server_api import EXCLUDED, ServerApi, ServerError, server_apis
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion, Group, Prompt

REFUSALS = (400, 413, 422)
"""Statuses by which a server refuses one request, such as a text that is too long, and not all of them."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
"""Seconds before a request is repeated: at first, and after many times; it doubles."""
COMPARED = 256
"""Number of texts, and of a server's tokens, by which tokenizers are compared."""
PIECES = "the, of, Paris,\n,  ,\t, 1234,5.6e-7, don't, naïve, 东京,привет,🙂,{},.,def f(x):, != ".split(",")
"""Parts of the texts."""
MOST_LIKELIEST = 20
"""Likeliest tokens that a probe asks for: vLLM's default of --max-logprobs."""
MOST_MASS = 1.01
"""Sum of probabilities above which numbers are no logprobs; those of bf16 models sum to up to 1.002."""
REMEDY = (
    "Start it so that it reports logprobs of its model as they are: vLLM with --enable-scale-out and --logprobs-mode "
    "raw_logprobs, and --max-logprobs of at least as many likeliest tokens."
)
GREEDY = Sampling(max_new_tokens=1, cut=Cut(temperature=0.0))
AnyAnswer = TypeVar("AnyAnswer")


class ServedTeachers:
    """The teachers of a run that are on servers. The first rank of each replica asks for its completions."""

    def __init__(self, distill: DistillConfig, model: ModelConfig, is_stopped: Callable[[], bool]) -> None:
        """Send nothing yet; `model` is the policy's. Waits end soon after `is_stopped` has become true. Raises
        ConfigError without the servers' key.
        """
        make = server_apis(distill.server, model, model_name=None)
        self._distill, self._is_stopped = distill, is_stopped
        self._apis = {index: make(url) for index, url in distill.served.items()}
        self._pool = ThreadPoolExecutor(distill.server.concurrency, "teacher_request")
        self._ended = Event()
        self._retried: list[str] = []

    def ask(self, groups: Sequence[Group]) -> "list[list[Future[Tensor | str]]]":
        """Send requests for all completions, without waiting for answers."""
        return [
            [self._pool.submit(self._answer, group.prompt, completion) for completion in group.completions]
            for group in groups
        ]

    def answers(self, asked: "Sequence[Sequence[Future[Tensor | str]]]") -> list[list[Tensor | None]]:
        """Wait for the answers to `ask`. Returns `Completion.teacher_CW` of each completion, None if it was refused.
        Raises EngineError if a teacher gives no right answer for rl.distill.server.timeout_s or refuses all, and
        StoppedError if the run is to stop.
        """
        pending = {future for futures_G in asked for future in futures_G}
        try:
            while pending:
                done, pending = wait(pending, STOP_LOOK_S, FIRST_EXCEPTION)
                if self._is_stopped():
                    raise StoppedError("a wait for teachers was ended")
                for future in done:
                    future.result()
            found = [[future.result() for future in futures_G] for futures_G in asked]
            refusals = [answer for answers_G in found for answer in answers_G if isinstance(answer, str)]
            if refusals and len(refusals) == sum(map(len, found)):
                raise EngineError(f"all {len(refusals)} completions were refused by their teachers: {refusals[0]}")
        except McoreRlError:
            self.close()
            raise
        return [[None if isinstance(answer, str) else answer for answer in answers_G] for answers_G in found]

    def added(self, group: Group, answers_G: Sequence[Tensor | None]) -> Group:
        """Return the group with the teachers' answers; of refused completions all numbers are NaN."""
        pairs = zip(group.completions, answers_G, strict=True)
        taught = (replace(one, teacher_CW=self._unknown(one) if found is None else found) for one, found in pairs)
        return replace(group, completions=tuple(taught))

    def take_retries(self) -> int:
        """Return how many requests were repeated since the last call."""
        retried, self._retried = self._retried, []
        return len(retried)

    def close(self) -> None:
        """End the requests in progress."""
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for api in self._apis.values():
            api.cut()

    def _unknown(self, completion: Completion) -> Tensor:
        return torch.full((len(completion.tokens_T), self._distill.served_width), torch.nan)

    def _answer(self, prompt: Prompt, completion: Completion) -> Tensor | str:
        """Return `Completion.teacher_CW`, or the reason for which the teacher refuses the completion."""
        distill, teacher_CW = self._distill, self._unknown(completion)
        # Prompts without a teacher are refused at the start.
        api = self._apis.get(distill.index_of(prompt.problem.fields.get(distill.tag_field)) or 0)
        if api is None:  # its teacher is in the trainer
            return teacher_CW
        for start, end in pairwise((0, *completion.segments, len(completion.tokens_T))):
            before = () if start else prompt.tokens_T
            # Nothing predicts the first token of a later segment.
            tokens_T, first = (*before, *completion.tokens_T[start:end]), max(len(before), 1)
            ask = partial(api.scores, tokens_T, start=first - 1, top_k=distill.served_width // 2)
            try:
                logprobs, top = repeated(ask, distill.server.timeout_s, self._ended, self._retried)
            except ServerError as error:
                return str(error)
            rows = [(value, *sum(zip(*best, strict=True), ())) for value, best in zip(logprobs, top, strict=True)]
            numbers_CW = torch.tensor(rows, dtype=torch.float32).view(len(rows), distill.served_width)
            teacher_CW[end - len(rows) : end] = numbers_CW.masked_fill(numbers_CW <= EXCLUDED, -torch.inf)
        return teacher_CW


def repeated(ask: Callable[[], AnyAnswer], timeout_s: float, ended: Event, retried: list[str]) -> AnyAnswer:
    """Return `ask()`, repeated until its answer is right; `retried` gets the reason for each repetition. Raises
    ServerError for a status of REFUSALS, EngineError if the server refuses every request or gives no right answer for
    `timeout_s`, and StoppedError once `ended` is set.
    """
    began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except ServerError as error:
            if error.status in REFUSALS:
                raise
            if error.is_refusal or time.monotonic() - began_s > timeout_s:
                raise EngineError(
                    f"{error}. No right answer of a teacher came within rl.distill.server.timeout_s={timeout_s:g}, or "
                    "it refuses every request, and none counts as 0. Start it anew, then resume the run."
                ) from None
            retried.append(str(error))
        if ended.wait(pause_s):
            raise StoppedError("a wait for teachers was ended")
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def probed_teacher(
    url: str, distill: DistillConfig, model: ModelConfig, tokenizer: Tokenizer, longest_sample: int
) -> str:
    """Return the name of the model of the teacher at `url`, of a policy with this model and tokenizer, once its server
    has started. Raises ConfigError if its tokenizer is another, or it holds no sample of `longest_sample` tokens, and
    EngineError if it gives no logprobs at temperature 1, or others each time.
    """
    api, where = server_apis(distill.server, model, model_name=None)(url), f"rl.distill: teacher {url}"
    if distill.tokenizer is not None:  # before a wait for the server
        _refuse_other_tokens(f"{where}, by rl.distill.tokenizer,", load_tokenizer(distill.tokenizer), tokenizer)
    name, room = repeated(api.model, distill.server.timeout_s, Event(), [])
    if room <= longest_sample:
        raise ConfigError(
            f"{where} holds {room} tokens, and the longest prompt with its completion, {longest_sample}, and one token "
            "of an answer are to fit. Start it with a larger --max-model-len (SGLang: --context-length)."
        )
    if distill.tokenizer is None:
        _refuse_other_tokens(where, api, tokenizer)
    sequences = probe_sequences(FEWEST, tokenizer.vocab_size)
    top_k = distill.top_k if distill.forward_weight else min(MOST_LIKELIEST, tokenizer.vocab_size)
    gaps = defaultdict[str, list[float]](list)

    def differ(one: float, other: float) -> float:
        return abs(max(one, EXCLUDED) - max(other, EXCLUDED))

    try:
        for tokens_T in sequences:
            (first, top), (again, _) = (api.scores(tokens_T, top_k=top_k) for _ in range(2))
            made = api.generate(tokens_T, GREEDY, 0, salt="probe-teacher", request_id="probe-teacher")
            (scored,), _ = api.scores((*tokens_T, *made.tokens_T), start=len(tokens_T) - 1)
            gaps["asked twice"] += (differ(*pair) for pair in zip(first, again, strict=True))
            gaps["of a token that it chooses, as a text and as an answer"].append(differ(scored, made.logprobs_T[0]))
            if not 0 < (mass := max(sum(exp(each) for _, each in best) for best in top)) <= MOST_MASS:
                raise ServerError(f"the {top_k} likeliest tokens have a probability of {mass:.3g} together")
    except ServerError as error:
        raise EngineError(f"{where} gives no logprobs of a text: {error}. {REMEDY}") from None
    for what, gap in gaps.items():
        if not (nats := sum(gap) / len(gap)) <= MOST_MEAN:
            raise EngineError(f"{where}: its logprobs differ, {what}, by {nats:.3g} nats in the mean. {REMEDY}")
    return name


def _refuse_other_tokens(where: str, theirs: ServerApi | Tokenizer, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless texts and ids mean the same to a teacher as to the policy's `tokenizer`: some ids of a
    server, or all of a tokenizer, which may have further ones, as a vocabulary that is padded.
    """
    generator = random.Random(20260000)
    all_ids = range(tokenizer.vocab_size)
    differing: list[str] = []
    texts = ["".join(generator.choices(PIECES, k=12)) for _ in range(COMPARED)]
    ids: Sequence[int]
    text_of: Callable[[Sequence[int]], str]
    if isinstance(theirs, ServerApi):
        ids = generator.sample(all_ids, min(COMPARED, len(all_ids)))
        tokens_of, text_of = theirs.tokens_of, theirs.text_of
    else:
        ids, tokens_of, text_of = all_ids[: theirs.vocab_size], theirs.encode, theirs.decode
        others = {*all_ids[theirs.vocab_size :], *(theirs.special_ids ^ tokenizer.special_ids).intersection(all_ids)}
        differing += [f"the id {token}" for token in sorted(others)]
    try:
        differing += [f"the text {text!r}" for text in texts if tokens_of(text) != tokenizer.encode(text)]
        differing += [f"the id {token}" for token in ids if text_of([token]) != tokenizer.decode([token])]
    except ServerError as error:
        raise ConfigError(
            f"{where}: its tokenizer cannot be compared with the policy's: {error}. Start it with its tokenizer, or "
            "name that in rl.distill.tokenizer.path."
        ) from None
    if differing:
        raise ConfigError(
            f"{where} has another tokenizer than data.tokenizer.path names: {differing[0]} is not the same. Its "
            "logprobs would be of other texts. Name a teacher with the policy's tokenizer."
        )
