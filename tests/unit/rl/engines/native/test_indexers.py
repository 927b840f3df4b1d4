"""The native engine on attention over chosen keys: greedy tokens are those of whole passes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.rl.batch import evaluating
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native import engine as native_engine
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Prompt
from tests.generating import loaded, prompt_of, spelled
from tests.hf_models import VOCAB, oracle

GREEDY = Sampling(max_new_tokens=6, cut=Cut(temperature=0.0))
PROMPTS = (1, 3, 64, 65, 7, 8, 30)
"""Tokens of the prompts: less than the 8 keys that are chosen, and more."""
CASES = ("deepseek_v32", "glm_moe_dsa-shared")


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


@pytest.mark.matrix("glm_moe_dsa-shared-24-200-False")
@pytest.mark.parametrize(
    ("case", "slots", "step_tokens", "has_fixed_shapes"),
    [
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
def test_logprobs_are_those_of_whole_passes(one_rank: Mesh) -> None:
    chunks, model = chunks_of("glm_moe_dsa-shared", one_rank), oracle("glm_moe_dsa-shared").ours
    engine = MegatronEngine(chunks, one_rank, model, spelled, NativeConfig(slots=3, step_tokens=40))
    groups = engine.generate(prompts(), Sampling(max_new_tokens=40), [[1, 2]] * len(PROMPTS))
    with evaluating(chunks):
        for group in groups:
            for completion in group.completions:
                logits_SV = logits_of(chunks[0], [*group.prompt.tokens_T, *completion.tokens_T])
                all_TV = logits_SV[len(group.prompt.tokens_T) - 1 : -1].double().log_softmax(-1)
                wanted_T = all_TV.gather(1, torch.tensor(completion.tokens_T)[:, None]).squeeze(1)
                assert completion.logprobs_T == pytest.approx(wanted_T.tolist(), abs=1e-4)


def overlap_of(engine: MegatronEngine) -> tuple[float, float] | None:
    metrics = engine.take_metrics()
    assert [metric.name for metric in metrics] in ([], ["routes/index_overlap"])
    return (float(metrics[0].value), float(metrics[0].count)) if metrics else None


@pytest.mark.matrix("deepseek_v32-False")
@pytest.mark.parametrize("has_fixed_shapes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_training_chooses_the_keys_of_the_engine(case, has_fixed_shapes, one_rank, monkeypatch):
    """At the positions behind the 8th of the first completion of each version, in each layer with an indexer."""
    chunks, model = chunks_of(case, one_rank), oracle(case).ours
    config = NativeConfig(slots=3, step_tokens=11)
    engine = MegatronEngine(chunks, one_rank, model, spelled, config, has_fixed_shapes=has_fixed_shapes)
    num_prompt, num_layers = 20, model.mixers.count("indexed")
    tokens = torch.randint(0, VOCAB, (num_prompt,), generator=torch.Generator().manual_seed(4)).tolist()
    asked = [prompt_of(tokens), prompt_of(tokens[:3])]
    engine.generate(asked, GREEDY, [[0] * 4] * 2)
    # The last token enters no layer.
    count = float(num_layers * (num_prompt + GREEDY.max_new_tokens - 1 - 8))
    assert overlap_of(engine) == pytest.approx((count, count))
    engine.generate(asked, GREEDY, [[0] * 4] * 2)
    assert overlap_of(engine) is None, "once for each version of the weights"

    def after_an_update(passed: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        for name, weight in passed[0].named_parameters():
            if "indexer.linear_wk" in name:
                weight.data.neg_()
        return run_pass(passed, *args, **kwargs)

    monkeypatch.setattr(native_engine, "run_pass", after_an_update)
    engine.update_weights(1)
    engine.generate(asked, GREEDY, [[0] * 4] * 2)
    same, compared = overlap_of(engine) or (0.0, 0.0)
    assert compared == count and 0.2 * count < same < 0.8 * count


def test_short_samples_have_no_choice_to_compare(one_rank: Mesh) -> None:
    chunks, model = chunks_of("deepseek_v32", one_rank), oracle("deepseek_v32").ours
    engine = MegatronEngine(chunks, one_rank, model, spelled, NativeConfig(slots=3, step_tokens=11))
    engine.generate([prompt_of([5, 6])], GREEDY, [[0]])
    assert overlap_of(engine) is None
