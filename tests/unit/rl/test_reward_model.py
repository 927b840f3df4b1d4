"""Reward models: the scores of whole batches, their normalisation, and what is refused."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.backend.platform import start
from mcore_rl.checkpoint.weights import save_weights
from mcore_rl.config.evaluation import evaluation_conditions
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.rewards.from_model import RewardModel, RewardModels
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.types import Completion, Group, single_version
from mcore_rl.run.rollouts import load_reward_models, reward_model_source
from tests.generating import prompt_of
from tests.tiny_models import TINY

MODEL = TINY["qwen3_moe"]
COMPLETIONS = [[[5, 6, 7], [8]], [[9] * 12, [10, 11, 3, 4]], [[1, 2], [3, 3, 3, 3, 3]]]


def groups() -> list[Group]:
    return [
        Group(
            prompt=prompt_of([20 + p] * (p + 1), str(p)),
            completions=tuple(
                Completion(
                    text="x",
                    tokens_T=tuple(said),
                    logprobs_T=(0.0,) * len(said),
                    versions=single_version(0, len(said)),
                    finish="stop",
                )
                for said in of_prompt
            ),
        )
        for p, of_prompt in enumerate(COMPLETIONS)
    ]


def config_of(path: Path, *overrides: str) -> RlRunConfig:
    config = load_config(
        RlRunConfig,
        None,
        [
            f"rl.reward.parts=['model:{path}']",
            "rl.prompts.task=copying",
            "rl.prompts.max_tokens=8",
            "rl.rollout.max_new_tokens=12",
            "rl.update.max_tokens_per_microbatch=24",
            *overrides,
        ],
    )
    return config.model_copy(update={"model": MODEL})


@pytest.fixture(scope="module")
def checkpoint(one_rank: Mesh, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A reward model with a random head, and its score `[P, G]` of each completion alone, at the last token."""
    platform = start(PlatformConfig())
    (chunk,) = build_model(MODEL.scored, one_rank, platform, PlatformConfig())
    head = unwrap(chunk).output_layer
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
        head.shift.fill_(0.25)
        alone = []
        for group in groups():
            for completion in group.completions:
                tokens_1S = torch.tensor([[*group.prompt.tokens_T, *completion.tokens_T]])
                positions_1S = torch.arange(tokens_1S.shape[1])[None]
                alone.append(chunk.eval()(tokens_1S, positions_1S, None)[0, -1, 0].double())
    folder = tmp_path_factory.mktemp("rm")
    save_weights([chunk], one_rank, MODEL.scored, folder)
    return folder, torch.stack(alone).view(3, 2)


@pytest.mark.parametrize("store", ["device", "host"])
def test_packed_scores_are_those_of_each_completion_alone(
    store: str, checkpoint: tuple[Path, Tensor], one_rank: Mesh
) -> None:
    path, alone_PG = checkpoint
    config = config_of(path, f"rl.reward.model_store={store}")
    platform = start(PlatformConfig())
    source = reward_model_source(f"model:{path}", config, Tokenizer.__new__(Tokenizer))
    model = RewardModel(source, config, one_rank, platform)
    for _ in range(2):
        scores_PG = model.scores(groups())
        assert (scores_PG - alone_PG).abs().max() < 2e-6
    assert scores_PG.std() > 0.1
    assert model.scores([]).shape == (0, 0)


def test_scores_are_normalised_by_all_those_of_the_training_so_far(
    checkpoint: tuple[Path, Tensor], one_rank: Mesh
) -> None:
    path, alone_PG = checkpoint
    config = config_of(path, "rl.reward.normalize_models=true")
    models = load_reward_models(config, Tokenizer.__new__(Tokenizer), one_rank, start(PlatformConfig()))
    assert isinstance(models, RewardModels)
    every = groups()
    models.scores(every[:2], are_counted=True)
    models.scores(every, are_counted=False)
    got_PG = models.scores(every[2:], are_counted=True)[f"model:{path}"]
    seen = alone_PG.flatten().tolist()
    wanted = [(score - statistics.fmean(seen)) / statistics.stdev(seen) for score in seen[4:]]
    assert got_PG.flatten().tolist() == pytest.approx(wanted, abs=1e-5)
    assert models.moments[f"model:{path}"][0] == 6
    # As a checkpoint saves them.
    assert json.loads(json.dumps(models.moments)) == models.moments


def test_a_reward_is_the_weighted_sum_of_models_and_functions_and_the_function_decides_what_is_correct(
    checkpoint: tuple[Path, Tensor],
) -> None:
    path, alone_PG = checkpoint
    part = f"model:{path}"
    config = config_of(path, f"rl.reward.parts=['{part}', 'length']", "rl.reward.weights=[2.0, 0.5]")
    reward_config = config.rl.reward.model_copy(update={"length_max_tokens": 4})
    scores_PG = alone_PG.clone()
    scores_PG[0, 0] = torch.nan
    with Reward(reward_config, max_new_tokens=12) as reward:
        scores = reward(groups(), {part: scores_PG})
    lengths = scores.parts["length"]
    wanted_PG = 2.0 * scores_PG + 0.5 * lengths
    assert torch.equal(scores.rewards_PG.isnan(), wanted_PG.isnan())
    assert torch.allclose(scores.rewards_PG.nan_to_num(), wanted_PG.nan_to_num())
    assert [failed.failure.kind for failed in scores.failures] == ["not_finite"]
    assert scores.correct_part == "length"
    assert config_of(path).rl.reward.correct_part is None


def test_a_language_model_and_another_vocabulary_are_refused(one_rank: Mesh, tmp_path: Path) -> None:
    platform = PlatformConfig()
    for name, model in (("logits", MODEL), ("small", MODEL.model_copy(update={"vocab_size": 99}).scored)):
        chunks = build_model(model, one_rank, start(platform), platform)
        save_weights(chunks, one_rank, model, tmp_path / name)
    tokenizer = Tokenizer.__new__(Tokenizer)
    for name, reason in (("logits", "gives no score"), ("small", "99 tokens, the policy 120")):
        path = tmp_path / name
        with pytest.raises(ConfigError, match=reason):
            reward_model_source(f"model:{path}", config_of(path), tokenizer)


def test_the_conditions_of_an_accuracy_name_the_part_that_decides_it() -> None:
    for reward, decides in (
        ({"parts": ["model:a", "exact"]}, "exact"),
        ({"parts": ["model:a"]}, None),
        ({"parts": ["numeric"], "correct": "auto"}, "numeric"),
        ({"parts": ["length", "numeric"], "correct": "numeric"}, "numeric"),
        ({"parts": ["length"], "correct": "none"}, None),
        ({"parts": ["length"], "correct": None}, None),
    ):
        assert evaluation_conditions({"rl": {"reward": reward}})["correct_by"] == decides
