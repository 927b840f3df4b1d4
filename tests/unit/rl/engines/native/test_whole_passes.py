"""The native engine on gated delta nets, whose state cannot be cut back, and on attention over chosen keys: tokens are
those of whole passes.
"""

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.batch import evaluating
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Prompt
from tests.generating import loaded, prompt_of, spelled
from tests.hf_models import VOCAB, oracle

GREEDY = Sampling(max_new_tokens=6, cut=Cut(temperature=0.0))
PROMPTS = (1, 3, 64, 65, 2, 7, 8, 30)
"""Tokens of the prompts: less than the taps of a convolution, or than the 8 keys that are chosen, a chunk, and more."""


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in PROMPTS]
    return [prompt_of(tokens, str(len(tokens))) for tokens in ids]


def chunks_of(case: str, mesh: Mesh) -> list[nn.Module]:
    theirs = oracle(case)
    return loaded(theirs.ours, theirs.tensors, mesh)


@torch.no_grad()
def logits_of(chunk: nn.Module, tokens: list[int]) -> Tensor:
    """`[S, V]` of a pass over the whole sequence."""
    ids = torch.tensor([tokens])
    at = torch.arange(len(tokens))[None]
    logits: Tensor = chunk(input_ids=ids, position_ids=at, attention_mask=None)[0, :, :VOCAB]
    return logits


@pytest.mark.matrix("qwen3_5_text-24-200-False")
@pytest.mark.parametrize(
    ("case", "slots", "step_tokens", "has_fixed_shapes"),
    [
        ("qwen3_next", 3, 5, False),
        ("qwen3_next", 5, 64, True),
        ("qwen3_5_moe_text", 4, 11, False),
        ("qwen3_5_text", 2, 40, False),
        ("qwen3_5_text", 24, 200, False),
        ("deepseek_v32", 3, 5, False),
        ("deepseek_v32", 5, 64, True),
        ("glm_moe_dsa-shared", 2, 40, False),
        ("glm_moe_dsa-shared", 24, 200, False),
    ],
)
def test_greedy_tokens_are_those_of_whole_passes(case, slots, step_tokens, has_fixed_shapes, one_rank):
    """Groups of four share fewer slots, which others had before; prompts are cut at any position."""
    chunks, model = chunks_of(case, one_rank), oracle(case).ours
    config = NativeConfig(slots=slots, step_tokens=step_tokens)
    engine = MegatronEngine(chunks, one_rank, model, spelled, config, has_fixed_shapes=has_fixed_shapes)
    groups = engine.generate(prompts(), GREEDY, [[0] * 4] * len(PROMPTS))
    with evaluating(chunks):
        for group in groups:
            first, *others = (completion.tokens_T for completion in group.completions)
            assert all(tokens == first for tokens in others)
            logits_SV = logits_of(chunks[0], [*group.prompt.tokens_T, *first])
            wanted_T = logits_SV[len(group.prompt.tokens_T) - 1 : -1].argmax(-1)
            assert first == tuple(wanted_T.tolist())


@pytest.mark.full
@pytest.mark.parametrize(("case", "within"), [("qwen3_next", 3e-4), ("glm_moe_dsa-shared", 1e-4)])
def test_logprobs_are_those_of_whole_passes(case: str, within: float, one_rank: Mesh) -> None:
    """Up to the rounding that gated delta nets amplify: chunks and single tokens sum in other orders."""
    chunks, model = chunks_of(case, one_rank), oracle(case).ours
    engine = MegatronEngine(chunks, one_rank, model, spelled, NativeConfig(slots=3, step_tokens=40))
    groups = engine.generate(prompts(), Sampling(max_new_tokens=40), [[1, 2]] * len(PROMPTS))
    with evaluating(chunks):
        for group in groups:
            for completion in group.completions:
                logits_SV = logits_of(chunks[0], [*group.prompt.tokens_T, *completion.tokens_T])
                all_TV = logits_SV[len(group.prompt.tokens_T) - 1 : -1].double().log_softmax(-1)
                wanted_T = all_TV.gather(1, torch.tensor(completion.tokens_T)[:, None]).squeeze(1)
                assert completion.logprobs_T == pytest.approx(wanted_T.tolist(), abs=within)
