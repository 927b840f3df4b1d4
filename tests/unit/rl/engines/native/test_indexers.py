"""Training chooses the keys that the native engine chose, of attention over chosen keys."""

from typing import Any

import pytest
import torch
from torch import nn

from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.rl.engines.native import engine as native_engine
from mcore_rl.rl.engines.native.engine import MegatronEngine
from tests.generating import prompt_of, spelled
from tests.hf_models import VOCAB, oracle
from tests.unit.rl.engines.native.test_whole_passes import GREEDY, chunks_of

CASES = ("deepseek_v32", "glm_moe_dsa-shared")


def overlap_of(engine: MegatronEngine) -> tuple[float, float] | None:
    metrics = engine.take_metrics()
    assert [metric.name for metric in metrics] in ([], ["routes/index_overlap"])
    return (float(metrics[0].value), float(metrics[0].count)) if metrics else None


@pytest.mark.full
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
