"""Reward models: the scores of whole batches, their normalisation, and what is refused."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
import torch
from torch import Tensor

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.sft import evaluation_conditions
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.rl.frozen_model import FrozenModel
from mcore_rl.rl.models.critic import refuse_other_critic
from mcore_rl.rl.rewards.from_model import (
    RewardModel,
    RewardModelSource,
    load_reward_models,
    reward_model_source,
    whole_reader,
)
from mcore_rl.rl.rewards.interface import Outcome, Score
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.types import Group, Problem, Prompt
from mcore_rl.rl.workers import FailedScore
from mcore_rl.storage.checkpoint import find_checkpoint, read_marker, write_marker
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from tests.generating import prompt_of
from tests.rounding import fp32_rounding
from tests.tiny_models import TINY
from tests.unit.rl.groups import completion_of

MODEL = TINY["qwen3_moe"]
ROUNDING = {"atol": fp32_rounding(18.0, MODEL.hidden_size), "rtol": 0.0}
"""Scores of up to 18, which libraries sum in another order for another number of rows."""
COMPLETIONS = [[[5, 6, 7], [8]], [[9] * 12, [10, 11, 3, 4]], [[1, 2], [3, 3, 3, 3, 3]]]


def groups() -> list[Group]:
    return [
        Group(
            prompt=prompt_of([20 + p] * (p + 1), str(p)),
            completions=tuple(completion_of("x", tuple(said)) for said in of_prompt),
        )
        for p, of_prompt in enumerate(COMPLETIONS)
    ]


def config_of(path: Path, *overrides: str) -> RlRunConfig:
    words = [f"rl.reward.parts=['model:{path}']", "rl.prompts.task=copying", "rl.prompts.max_tokens=8"]
    words += ["rl.rollout.max_new_tokens=12", "rl.update.max_tokens_per_microbatch=24", *overrides]
    return load_config(RlRunConfig, None, words).model_copy(update={"model": MODEL})


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


def source_of(part: str, config: RlRunConfig, tokenizer: Tokenizer) -> RewardModelSource:
    return reward_model_source(part, config.model, config.rl, config.mesh, config.packed_length, tokenizer)


def values(outcomes: list[Outcome]) -> Tensor:
    return torch.tensor([one.value for one in outcomes if isinstance(one, Score)], dtype=torch.float64)


@pytest.mark.matrix("host")
@pytest.mark.parametrize("store", ["device", "host"])
def test_packed_scores_are_those_of_each_completion_alone(store, checkpoint, one_rank, tmp_path):
    path, alone_PG = checkpoint
    config = config_of(path, f"rl.reward.model_store={store}")
    platform = start(PlatformConfig())
    source = source_of(f"model:{path}", config, Tokenizer.__new__(Tokenizer))
    place = (source.model, source.path, one_rank, platform, config.platform)
    frozen = FrozenModel(*place, store=store, verify_checksums=True)
    packing = {"packed_length": config.packed_length, "packed_multiple": config.packed_multiple}
    model = RewardModel(source, whole_reader, frozen, one_rank, platform.device, **packing)
    for _ in range(2):
        scores_PG = values(model.outcomes(groups())).view(3, 2)
        torch.testing.assert_close(scores_PG, alone_PG, **ROUNDING)
    assert scores_PG.std() > 0.1
    assert model.outcomes([]) == []


def test_its_tokens_travel_as_the_policys_do(checkpoint: tuple[Path, Tensor]) -> None:
    """The checkpoint says how they did in its own training, on another mesh."""
    path, _ = checkpoint
    for dispatcher in ("alltoall", "allgather"):
        policy = MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"dispatcher": dispatcher})})
        config = config_of(path).model_copy(update={"model": policy})
        source = source_of(f"model:{path}", config, Tokenizer.__new__(Tokenizer))
        assert source.model.moe.dispatcher == dispatcher


def stepped(text: str, tokens_T: tuple[int, ...]) -> Group:
    return Group(prompt=prompt_of([20, 21], "p"), completions=(completion_of(text, tokens_T),))


def score_of(path: Path, mesh: Mesh, tokens: list[int]) -> float:
    """The score of a text alone, at its last token, by a model that is built and read anew."""
    (chunk,) = build_model(MODEL.scored, mesh, start(PlatformConfig()), PlatformConfig())
    load_weights([chunk], mesh, MODEL.scored, path)
    with torch.no_grad():
        scores = chunk.eval()(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
    return float(scores[0, -1, 0])


@pytest.mark.full
@pytest.mark.parametrize("value", ["score", "probability"])
def test_the_score_of_a_step_is_that_of_the_text_up_to_its_end(value, checkpoint, one_rank):
    path, _ = checkpoint
    part = f"step_model:{path}"
    config = config_of(path, f"rl.reward.parts=['{part}']", f"rl.reward.step_value={value}")
    tokenizer = mock.create_autospec(Tokenizer, instance=True)
    tokenizer.decode = lambda tokens: "".join("\n" if token == 10 else chr(97 + token) for token in tokens)
    models = load_reward_models(config, tokenizer, one_rank, start(PlatformConfig()))
    every = [stepped("fg\n\nhi\nj", (5, 6, 10, 10, 7, 8, 10, 9)), stepped("d", (3, 1)), stepped("\n", (10,))]
    outcomes = models.outcomes(every, are_counted=True)[part]
    ends = [[(4, [5, 6, 10, 10]), (7, [5, 6, 10, 10, 7, 8, 10]), (8, [5, 6, 10, 10, 7, 8, 10, 9])], [(1, [3, 1])]]
    for outcome, wanted in zip(outcomes, ends, strict=False):
        scores = [score_of(path, one_rank, [20, 21, *tokens]) for _, tokens in wanted]
        if value == "probability":
            scores = [1 / (1 + math.exp(-score)) for score in scores]
        assert [step.end for step in outcome.steps] == [end for end, _ in wanted]
        assert [step.value for step in outcome.steps] == pytest.approx(scores, abs=ROUNDING["atol"])
        assert outcome.value == pytest.approx(sum(scores), abs=len(scores) * ROUNDING["atol"])
    assert outcomes[2] == FailedScore("bad_steps", "the completion has no step")


@pytest.mark.full
def test_texts_are_tokenised_again_for_a_model_with_a_tokenizer_of_its_own(checkpoint, one_rank, tmp_path):
    path, _ = checkpoint
    words = ["<unk>", "<end>", "ask", "one", "two", "long"]
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(["<end>"])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    named = f"rl.reward.model_tokenizer={{kind='huggingface',path='{tmp_path}'}}"
    policy = mock.create_autospec(Tokenizer, instance=True)
    policy.digest, policy.vocab_size = "another", 120
    problem = Problem(problem_id="p", prompt="ask", answer="", fields={})
    texts = ["one\ntwo", "long " * MODEL.max_position]
    completions = tuple(completion_of(text, (7, 8)) for text in texts)
    group = Group(prompt=Prompt(problem=problem, tokens_T=(99,)), completions=completions)
    whole, steps = f"model:{path}", f"step_model:{path}"
    with pytest.raises(ConfigError, match=r"Set rl.reward.model_chat_template"):
        source_of(whole, config_of(path, named), policy)
    words = (
        f"rl.reward.parts=['{whole}','{steps}']",
        "rl.reward.model_chat_template=raw",
        "rl.reward.step_value=score",
    )
    config = config_of(path, named, *words)
    models = load_reward_models(config, policy, one_rank, start(PlatformConfig()))
    found = models.outcomes([group], are_counted=True)
    first, both = score_of(path, one_rank, [2, 3]), score_of(path, one_rank, [2, 3, 4, 1])
    assert found[whole][0].value == pytest.approx(both, abs=ROUNDING["atol"])
    assert [step.value for step in found[steps][0].steps] == pytest.approx([first, both], abs=ROUNDING["atol"])
    assert [step.end for step in found[steps][0].steps] == [4, 7]
    too_long = found[whole][1]
    assert too_long.text == f"the text has {MODEL.max_position + 2} tokens, the reward model reads {MODEL.max_position}"


@pytest.mark.full
def test_scores_are_normalised_by_all_those_of_the_training_so_far(checkpoint, one_rank):
    path, alone_PG = checkpoint
    config = config_of(path, "rl.reward.normalize_models=true")
    models = load_reward_models(config, Tokenizer.__new__(Tokenizer), one_rank, start(PlatformConfig()))
    every = groups()
    models.outcomes(every[:2], are_counted=True)
    models.outcomes(every, are_counted=False)
    got = models.outcomes(every[2:], are_counted=True)[f"model:{path}"]
    seen = alone_PG.flatten().tolist()
    wanted = [(score - statistics.fmean(seen)) / statistics.stdev(seen) for score in seen[4:]]
    assert values(got).tolist() == pytest.approx(wanted, abs=1e-5)
    assert models.moments[f"model:{path}"][0] == 6
    # As a checkpoint saves them.
    assert json.loads(json.dumps(models.moments)) == models.moments


def test_a_reward_is_the_weighted_sum_of_models_and_functions_and_the_function_decides_what_is_correct(checkpoint):
    path, alone_PG = checkpoint
    part = f"model:{path}"
    config = config_of(path, f"rl.reward.parts=['{part}', 'length']", "rl.reward.weights=[2.0, 0.5]")
    reward_config = config.rl.reward.model_copy(update={"length_max_tokens": 4})
    scores_PG = alone_PG.clone()
    scores_PG[0, 0] = torch.nan
    outcomes: list[Outcome] = [FailedScore("not_finite", "nan"), *map(Score, scores_PG.flatten().tolist()[1:])]
    with Reward(reward_config, max_new_tokens=12) as reward:
        scores = reward(groups(), {part: outcomes})
    lengths = scores.parts["length"]
    wanted_PG = 2.0 * scores_PG + 0.5 * lengths
    assert torch.equal(scores.rewards_PG.isnan(), wanted_PG.isnan())
    assert torch.allclose(scores.rewards_PG.nan_to_num(), wanted_PG.nan_to_num())
    assert [failed.failure.kind for failed in scores.failures] == ["not_finite"]
    assert scores.correct_part == "length"
    assert config_of(path).rl.reward.correct_part is None


@pytest.mark.full
def test_a_language_model_and_another_vocabulary_are_refused(one_rank: Mesh, tmp_path: Path) -> None:
    platform = PlatformConfig()
    for name, model in (("logits", MODEL), ("small", MODEL.model_copy(update={"vocab_size": 99}).scored)):
        chunks = build_model(model, one_rank, start(platform), platform)
        save_weights(chunks, one_rank, model, tmp_path / name)
    tokenizer = Tokenizer.__new__(Tokenizer)
    for name, reason in (("logits", "gives no score"), ("small", "99 tokens, the policy 120, and nothing says which")):
        path = tmp_path / name
        with pytest.raises(ConfigError, match=reason):
            source_of(f"model:{path}", config_of(path), tokenizer)


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


@pytest.mark.full
def test_a_critic_of_another_family_or_size_is_refused_before_work(one_rank: Mesh, tmp_path: Path) -> None:
    settings = PlatformConfig()
    other = TINY["deepseek_v3"].model_copy(update={"mtp_layers": 0})
    small = MODEL.model_copy(update={"num_layers": 1})
    for name, model in (("other", other.scored), ("small", small.scored), ("same", MODEL.scored), ("policy", MODEL)):
        save_weights(build_model(model, one_rank, start(settings), settings), one_rank, model, tmp_path / name)

    def refuse(name: str) -> None:
        refuse_other_critic(str(tmp_path / name), MODEL, tmp_path / "run")

    for name in ("same", "policy"):
        refuse(name)
    with pytest.raises(ConfigError, match=r"a model with family deepseek_v3 instead of qwen3_moe.*Name a checkpoint"):
        refuse("other")
    with pytest.raises(ConfigError, match=rf"a model with num_layers 1 instead of {MODEL.num_layers}: the critic"):
        refuse("small")
    same = find_checkpoint(tmp_path / "same")
    write_marker(same, replace(read_marker(same), settings={"lora": {"rank": 4}}))
    with pytest.raises(ConfigError, match=r"has low-rank adapters, .* `mcore-rl convert export --merge`"):
        refuse("same")
