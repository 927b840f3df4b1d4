"""Answers of a fake server by the native engine, on weights of its own that updates replace."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.model.build import unwrap
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import evaluating, without_capacity
from mcore_rl.rl.sampling import Cut
from tests.fake_server import Answer, Asked
from tests.generating import engine_on, loaded, prompt_of
from tests.hf_weights import to_global
from tests.served_adapters import with_adapter

ONE_AT_A_TIME = threading.Lock()
"""Megatron's modules are not made for threads."""


class ModelAnswers:
    """The native engine on one rank. An update whose files lack a tensor leaves that tensor as it was."""

    def __init__(
        self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, tensors: Mapping[str, Tensor]
    ):
        self.chunks, self.mesh, self.model, self.tensors = list(chunks), mesh, model, dict(tensors)
        self.engine = engine_on(chunks, mesh, model)
        self.forgets: str | None = None
        """Tensor that an update leaves as it was."""

    def complete(self, asked: Asked) -> Answer:
        sampling = Sampling(
            max_new_tokens=asked.max_tokens,
            cut=Cut(temperature=asked.temperature, top_k=asked.top_k),
            stop_tokens=asked.stops,
            vocab_size=self.model.vocab_size - len(asked.never),
            with_routes=self.model.is_moe,
        )
        with ONE_AT_A_TIME:
            group = self.engine.generate([prompt_of(asked.prompt)], sampling, [[asked.seed]])[0]
        one = group.completions[0]
        experts = None if one.experts_TLK is None else one.experts_TLK.numpy().astype(np.int64)
        return Answer(tokens=one.tokens_T, logprobs=one.logprobs_T, experts=experts)

    def score(self, tokens: Sequence[int]) -> list[float]:
        tokens_1S = torch.tensor([tokens])
        positions_1S = torch.arange(len(tokens))[None]
        with ONE_AT_A_TIME, torch.no_grad(), evaluating(self.chunks), without_capacity(self.chunks):
            logits_1SV = unwrap(self.chunks[0])(tokens_1S, positions_1S, None)
        logprobs_SV = logits_1SV[0, :-1, : self.model.vocab_size].double().log_softmax(-1)
        return logprobs_SV.gather(1, tokens_1S[0, 1:, None]).squeeze(1).tolist()

    def load(self, update: Mapping[str, Any]) -> None:
        found = load_file(Path(update["path"]))
        self.tensors |= {name: tensor for name, tensor in found.items() if name != self.forgets}

    def finish(self) -> None:
        with ONE_AT_A_TIME:
            copy_in(self.chunks, to_global(self.tensors, self.model))

    def adapted(self, folder: str) -> "ModelAnswers":
        """Answers of another model."""
        tensors = with_adapter(self.tensors, Path(folder))
        with ONE_AT_A_TIME:
            return ModelAnswers(loaded(self.model, tensors, self.mesh), self.mesh, self.model, tensors)
