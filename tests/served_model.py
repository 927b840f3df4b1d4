"""Answers of a fake server by the native engine, on weights of its own that updates replace."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import weight_map
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.build import copy_in, unwrap
from mcore_rl.rl.batch import evaluating, without_capacity
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.sampling import Cut
from tests.fake_server import Answer, Asked, FakeServer
from tests.generating import engine_on, loaded, prompt_of
from tests.hf_weights import to_global
from tests.served_adapters import with_adapter

ONE_AT_A_TIME = threading.RLock()
"""Megatron's modules are not made for threads, and an update comes between two completions."""


def reported_logprobs(logits_SV: Tensor, tokens: Sequence[int], asked: Asked) -> list[float]:
    """Logprobs of sampled tokens as servers report them, in vLLM's order: temperature, min-p, top-k, top-p."""
    if asked.logprobs != "raw" and asked.temperature:
        logits_SV = logits_SV / asked.temperature
    if asked.logprobs == "processed":
        probabilities_SV = logits_SV.softmax(-1)
        lowest_S1 = asked.min_p * probabilities_SV.amax(-1, keepdim=True)
        logits_SV = logits_SV.masked_fill(probabilities_SV < lowest_S1, -torch.inf)
        if asked.top_k:
            lowest_S1 = logits_SV.topk(asked.top_k).values[:, -1:]
            logits_SV = logits_SV.masked_fill(logits_SV < lowest_S1, -torch.inf)
        best_SV, order_SV = logits_SV.softmax(-1).sort(-1, descending=True)
        is_out_SV = best_SV.cumsum(-1) - best_SV >= asked.top_p
        logits_SV = logits_SV.masked_fill(is_out_SV.gather(1, order_SV.argsort(-1)), -torch.inf)
    logprobs_SV = logits_SV.log_softmax(-1)
    return logprobs_SV.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


def by_token(logprobs_SV: Tensor, tokens: Sequence[int], top: int) -> list[dict[int, float]]:
    """The logprobs of each token after the first and of the likeliest in its place, by token."""
    likeliest_SK = logprobs_SV.topk(top).indices.tolist()
    return [
        {token: float(row_V[token]) for token in (*best_K, wanted)}
        for row_V, best_K, wanted in zip(logprobs_SV, likeliest_SK, tokens[1:], strict=True)
    ]


class ModelAnswers:
    """The native engine on one rank. An update whose files lack a tensor leaves that tensor as it was."""

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, tensors: Mapping[str, Tensor]):
        self.chunks, self.mesh, self.model, self.tensors = list(chunks), mesh, model, dict(tensors)
        self.engine = engine_on(chunks, mesh, model)
        self.scored_ids = model.vocab_size
        """Ids that have a probability; the trainer excludes those that pad the vocabulary."""
        self.forgets: str | None = None
        """Tensor that an update leaves as it was."""

    def complete(self, asked: Asked) -> Answer:
        cut = Cut(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p)
        sampling = Sampling(
            max_new_tokens=asked.max_tokens,
            cut=cut,
            stop_tokens=asked.stops,
            vocab_size=min(self.model.vocab_size - len(asked.never), self.scored_ids),
            with_routes=self.model.is_moe,
        )
        with ONE_AT_A_TIME:
            group = self.engine.generate([prompt_of(asked.prompt)], sampling, [[asked.seed]])[0]
            one = group.completions[0]
            logits_SV = self._logits((*asked.prompt, *one.tokens_T))[len(asked.prompt) - 1 :]
            logits_SV[:, self.scored_ids :] = -torch.inf
        experts = None if one.experts_TLK is None else one.experts_TLK.numpy().astype(np.int64)
        if asked.never and asked.logprobs != "raw":
            logits_SV[:, sorted(asked.never)] = -torch.inf
        return Answer(
            tokens=one.tokens_T, logprobs=tuple(reported_logprobs(logits_SV, one.tokens_T, asked)), experts=experts
        )

    def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
        return by_token(self._logits(tokens)[:, : self.scored_ids].log_softmax(-1), tokens, top)

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """Float64 `[tokens - 1, V]`: those that predict tokens 1, 2, ..."""
        tokens_1S = torch.tensor([tokens])
        positions_1S = torch.arange(len(tokens))[None]
        with ONE_AT_A_TIME, torch.no_grad(), evaluating(self.chunks), without_capacity(self.chunks):
            logits_1SV = unwrap(self.chunks[0])(tokens_1S, positions_1S, None)
        return logits_1SV[0, :-1, : self.model.vocab_size].double()

    def load(self, update: Mapping[str, Any]) -> None:
        of_files = (load_file(Path(file["path"])) for file in update.get("files", ()))
        for found in (update.get("tensors", {}), *of_files):
            self.tensors |= {name: tensor for name, tensor in found.items() if name != self.forgets}

    def finish(self) -> None:
        with ONE_AT_A_TIME:
            copy_in(self.chunks, to_global(self.tensors, self.model))

    def adapted(self, folder: str) -> "ModelAnswers":
        """Answers of another model."""
        tensors = with_adapter(self.tensors, Path(folder))
        with ONE_AT_A_TIME:
            return ModelAnswers(loaded(self.model, tensors, self.mesh), self.mesh, self.model, tensors)


@contextmanager
def two_servers(
    model: ModelConfig, mesh: Mesh, kind: str = "vllm", weights: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[list[FakeServer], list[str]]]:
    """Two servers that compute, and the words of a config that name them. They begin with these weights, or with zeros,
    which are not those of any run.
    """
    start = weights or {name: torch.zeros(shape) for name, shape in weight_map(model).hf_shapes.items()}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                FakeServer(
                    ModelAnswers(loaded(model, start, mesh), mesh, model, start),
                    kind,
                    logprobs_mode="processed_logprobs",
                )
            )
            for _ in range(2)
        ]
        yield servers, [f"rl.engine.kind={kind}", f"rl.engine.urls={json.dumps([server.url for server in servers])}"]
