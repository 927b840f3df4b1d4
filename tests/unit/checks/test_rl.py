"""Each rule of RL, by settings that break it alone."""

from pathlib import Path

import pytest

from mcore_rl.checks.rl import rl_violations
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlConfig, RlRunConfig

REMEDIES = "Change Choose Clear Give Leave Lower Make Name Set Shorten Take".split()


def violations(words):
    overrides = words.split()
    if not any(word.startswith("prompts.") for word in overrides):
        overrides.append("prompts.task=sorting")
    return list(rl_violations(load_config(RlConfig, None, overrides)))


@pytest.mark.parametrize(
    "words",
    [
        "",
        "loss.kind=gspo",
        "loss.kind=gspo_token loss.router_shift=true",
        "loss.kind=kimi_k2 advantage.kind=mean loss.tau=0.1",
        "loss.kind=cispo",
        "loss.kind=rspo loss.router_shift_floor=0.5",
        "loss.kind=rspo loss.router_shift=false",
        "loss.kind=gspo loss.router_shift=true",
        "loss.kind=pkg.mod:loss loss.router_shift=true",
        "advantage.kind=steps loss.kind=gspo_token loss.kl_coeff=0.1",
        "loss.kl_coeff=0.04 loss.reference_refresh_rollouts=10",
        "loss.kl_coeff=0.04 loss.kl_estimator=k1 loss.kl_gradient=k2",
        "loss.kl_coeff=0.04 loss.kl_estimator=k1 loss.kl_in=reward",
        "loss.dual_clip=3 loss.importance_sampling=mask",
        "loss.kind=gspo loss.importance_sampling=sequence_mask",
        "loss.kind=gspo_token loss.importance_sampling=mask",
        "reward.parts=[math,format,length,pkg.mod:func] reward.weights=[1,0.1,0.1,1] reward.format_pattern=a "
        "reward.length_max_tokens=9 reward.answer_pattern=<a>(.*)</a>",
        "rollout.group_size=2 advantage.kind=leave_one_out_zscore advantage.ddof=0",
        "prompts.files=[a.jsonl]",
        "reward.parts=[model:runs/rm,exact] reward.weights=[1,0] reward.normalize_models=true",
        "reward.parts=[model:rm] reward.model_store=device",
        "advantage.kind=gae loss.kind=ppo advantage.critic.store=host update.store=host reward.parts=[model:rm] "
        "reward.model_store=device loss.kl_coeff=0.1 loss.reference_store=device",
        "reward.parts=[length,code] reward.weights=[1,0] reward.correct=code reward.length_max_tokens=9",
        "reward.parts=[model:rm,exact] reward.correct=model:rm",
        "reward.correct=none",
        "reward.parts=[http://node:1/score,exact] reward.correct=http://node:1/score reward.server.retries=0",
        "reward.parts=[http:https://node/score] reward.server.ca_file=a.pem",
        "reward.parts=[judge:a.jinja] reward.judge.url=http://node:8000/v1 reward.judge.model=m reward.judge.scale=10",
        "reward.parts=[step_model:runs/prm] advantage.kind=steps loss.kind=gspo_token reward.step_value=score",
        "reward.parts=[step_model:runs/prm,exact] advantage.kind=gae advantage.rewards_at=steps loss.kind=ppo",
        "reward.parts=[code] reward.code.partial=true reward.answer_pattern=<a>(.*)</a>",
        "advantage.kind=gae loss.kind=ppo rollout.group_size=1 advantage.critic.optim.lr=1e-5",
        "advantage.kind=gae loss.kind=ppo advantage.critic.load=runs/rm",
        "advantage.kind=gae advantage.gae_lambda=length advantage.length_alpha=0.1 loss.kl_coeff=0.1 loss.kl_in=reward",
        "advantage.kind=gae advantage.rewards_at=steps loss.kind=gspo_token advantage.whiten=false",
        "advantage.kind=reinforce_plus_plus rollout.group_size=1 advantage.gamma=0.99",
        "advantage.kind=reinforce_plus_plus_baseline advantage.gamma=0.99 rollout.dynamic_sampling=true",
        "advantage.kind=gae rollout.dynamic_sampling=true",
        "advantage.kind=remax rollout.group_size=1 loss.kl_coeff=0.2 loss.kl_target=6",
        "distill.teacher=runs/big advantage.kind=zero rollout.group_size=1",
        "distill.teacher=self distill.self_refresh_rollouts=4 distill.use=loss distill.estimator=vocabulary",
        "ptx.coeff=0.1 ptx.files=[chats.jsonl]",
        "prompts.task=countdown prompts.smallest=3 prompts.largest=4",
        "prompts.task=arithmetic environment.name=calculator reward.parts=[numeric,environment] reward.weights=[1,0]",
        "prompts.task=seeds environment.name=guessing reward.parts=[environment] environment.arguments={guesses=5}",
        "environment.name=own.module:Game reward.parts=[environment] advantage.kind=steps loss.kind=gspo_token",
        "rollout.max_staleness=4 engine.kind=my.module:engine loss.importance_sampling=truncate",
        "rollout.max_staleness=4 engine.kind=my.module:engine loss.kind=gspo loss.importance_sampling=sequence_mask",
        "rollout.max_staleness=1 engine.kind=my.module:engine update.old_logprobs=rollout",
        "rollout.max_staleness=2 engine.kind=my.module:engine loss.kind=kimi_k2 advantage.kind=mean",
        "rollout.max_staleness=1 engine.kind=my.module:engine loss.importance_sampling=mask prompts.task=seeds "
        "environment.name=guessing reward.parts=[environment]",
    ],
)
def test_these_settings_are_fine(words):
    assert violations(words) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("prompts.task=file", "files is empty"),
        ("rollout.max_staleness=1 loss.importance_sampling=mask", "train or generate"),
        ("rollout.max_staleness=1 engine.kind=my.module:engine", "whose ratio starts at the sampler"),
        ("rollout.max_staleness=2 engine.kind=my.module:engine loss.kind=gspo", 'sampling="sequence_truncate".'),
        ("rollout.max_staleness=2 engine.kind=my.module:engine update.old_logprobs=rollout", "or max_staleness=1"),
        (
            "rollout.max_staleness=2 engine.kind=my.module:engine loss.importance_sampling=mask "
            "rollout.dynamic_sampling=true",
            "refilled after its rewards",
        ),
        ("update.old_logprobs=rollout loss.importance_sampling=truncate", "every weight is 1"),
        ("prompts.task=sorting prompts.files=[a]", "not read"),
        ("prompts.task=sorting prompts.file_weights=[1]", "has 1 weights for 0 files in rl.prompts.files"),
        ("prompts.task=file prompts.files=[a,b] prompts.file_weights=[1]", "has 1 weights for 2 files"),
        ("prompts.task=file prompts.files=[a] prompts.file_weights=[-1]", "a weight is above 0"),
        ("prompts.task=sorting prompts.smallest=5", "is above"),
        ("prompts.task=seeds", "makes its own problems, and rl.environment.name is not set"),
        ("environment.max_turns=3", "rl.environment.max_turns without rl.environment.name"),
        ("reward.parts=[exact,environment]", "rl.environment.name is not set"),
        ("environment.name=calculator", 'lacks "environment"'),
        (
            "environment.name=calculator reward.parts=[exact,environment] environment.max_tokens=1023",
            "no room for one turn",
        ),
        ("prompts.task=seeds environment.name=python reward.parts=[environment]", "a tool that makes no problems"),
        ("prompts.task=sorting environment.name=guessing reward.parts=[environment]", 'Set rl.prompts.task="seeds"'),
        ("prompts.task=countdown prompts.smallest=1", "2 to 6 numbers"),
        ("rollout.temperature=0", "the same"),
        ("rollout.temperature=1e-300", "is below 1e-06"),
        ('rollout.stop_strings=["a",""]', "empty text"),
        ("rollout.group_size=1", "undefined"),
        ("rollout.group_size=1 advantage.kind=mean", "undefined"),
        ("rollout.group_size=2 advantage.kind=leave_one_out_zscore", "at least 3"),
        ("loss.clip_low=1", "nothing is clipped"),
        ("loss.dual_clip=1.1", "not above the upper clip"),
        ("loss.kind=rspo advantage.kind=steps", "one advantage a sequence"),
        ("loss.kind=rspo update.old_logprobs=rollout", "scores are recorded in the trainer's pass"),
        ("loss.router_shift_floor=0.5", "is not used without rl.loss.router_shift"),
        ("loss.aggregation_norm_tokens=5", "not used"),
        ("loss.kind=kimi_k2", "r - mean(r)"),
        ("loss.kind=kimi_k2 advantage.kind=steps", "r - mean(r)"),
        ("loss.kind=gspo advantage.kind=steps", "one advantage a sequence"),
        ("loss.kl_coeff=0.1 loss.kl_in=reward advantage.kind=steps", "of no step"),
        ("rollout.dynamic_sampling=true advantage.kind=steps", "whole rewards"),
        ("rollout.dynamic_sampling_by=reward", "not used with rl.rollout.dynamic_sampling=false"),
        (
            "rollout.dynamic_sampling=true rollout.dynamic_sampling_by=accuracy reward.correct=none",
            "decides which completions are correct",
        ),
        ("loss.reference_refresh_rollouts=3", "no reference"),
        ("loss.kl_coeff=0.1 loss.kl_estimator=k1", "whose mean is 0"),
        ("loss.kl_coeff=0.1 loss.kl_in=reward loss.kl_gradient=k2", "no gradient"),
        ("loss.importance_sampling=mask loss.importance_sampling_low=1.5", "does not hold 1"),
        ("loss.importance_sampling=truncate loss.importance_sampling_high=0.9", "truncates weights"),
        ("advantage.kind=reinforce_plus_plus_baseline loss.kind=gspo", "one advantage a sequence"),
        ("advantage.kind=reinforce_plus_plus_baseline rollout.group_size=1", "every advantage would be 0"),
        ("advantage.kind=gae advantage.length_alpha=0.1", "not used"),
        ("advantage.kind=gae loss.kind=gspo", "one advantage a sequence"),
        ("advantage.kind=gae loss.kind=kimi_k2", "r - mean(r)"),
        ("advantage.kind=gae advantage.bootstrap_truncated=true loss.mask_truncated=true", "no truncated"),
        ("advantage.kind=gae advantage.rewards_at=steps rollout.dynamic_sampling=true", "whole rewards"),
        ("advantage.kind=gae rollout.group_size=1 rollout.dynamic_sampling=true", "group of one"),
        ("advantage.kind=remax rollout.dynamic_sampling=true", "by its distance from the greedy"),
        ("loss.kl_target=6", "which no factor changes"),
        ("advantage.kind=zero", "nothing moves the policy"),
        ("distill.coeff=0.5", "there is no teacher"),
        ("distill.teacher=a distill.estimator=vocabulary", "of no sampled token"),
        ("distill.teacher=a distill.self_refresh_rollouts=4", 'no teacher is "self"'),
        ("distill.teacher=a loss.kind=gspo", "one advantage a sequence"),
        ("ptx.coeff=0.1", "either conversations or tokens"),
        ("ptx.coeff=0.1 ptx.files=[a] ptx.tokens=[b]", "either conversations or tokens"),
        ("ptx.files=[a]", "mixes no texts in"),
        ("loss.kl_coeff=0.2 loss.kl_horizon=6", "not used"),
        ("reward.parts=[model:]", "without a path"),
        ("reward.parts=[step_model:]", "without a path"),
        ("reward.parts=[http:node]", 'rl.reward.parts="http:node" is no address of a server'),
        ("reward.parts=[http://node/a?b=c]", "without a query"),
        ("reward.parts=[judge:] reward.judge.url=http://n/v1 reward.judge.model=m", "without a file"),
        ("reward.parts=[judge:a] reward.judge.model=m", "rl.reward.judge.url is not set"),
        ("reward.parts=[judge:a] reward.judge.url=http://node/v1", "rl.reward.judge.model is not set"),
        ("reward.parts=[judge:a] reward.judge.model=m reward.judge.url=node", "is no address"),
        (
            "reward.parts=[judge:a] reward.judge.model=m reward.judge.url=http://n/v1 reward.judge.score_pattern=a",
            "has no group",
        ),
        ("reward.judge.model=m", "rl.reward.judge.model: not used, because rl.reward.parts names no judge"),
        ("reward.server.retries=1", "rl.reward.server.retries: not used, because rl.reward.parts names no server"),
        ("reward.step_value=score", "rl.reward.step_value is not used"),
        ("reward.model_chat_template=raw", "rl.reward.model_chat_template is not used"),
        ("reward.normalize_models=true", "has none"),
        (
            "reward.parts=[step_model:rm] reward.normalize_models=true advantage.kind=steps loss.kind=gspo_token",
            "scores of steps are not normalised",
        ),
        ("reward.parts=[]", "is empty"),
        ("loss.reference_store=device", "there is no reference"),
        ("reward.correct=code", 'rl.reward.correct="code" is not among rl.reward.parts'),
        ("reward.code.partial=true", 'rl.reward.code.partial: not used, because rl.reward.parts lacks "code"'),
        ("reward.parts=[code] reward.code.timeout_s=10", "is not below rl.reward.timeout_s=10"),
        ("reward.parts=[exact,exact]", "twice"),
        ("reward.parts=[exactly]", 'names "exactly"'),
        ("reward.parts=[a/b:c]", 'names "a/b:c"'),
        ("reward.weights=[1,2]", "2 numbers for 1 parts"),
        ("reward.parts=[regex]", "regex_pattern is not set"),
        ("reward.format_pattern=a", "not used"),
        ("reward.parts=[regex] reward.regex_pattern='(a'", "no regular expression"),
        ("reward.answer_pattern=a", "no group"),
        ("reward.parts=[pkg:f] reward.answer_pattern=(a)", "not used"),
        ("reward.length_max_tokens=9", 'the part "length"'),
        ("reward.parts=[length]", 'the part "length"'),
        ("reward.parts=[length] reward.length_max_tokens=9 reward.length_min_tokens=10", "is above"),
        ("reward.parts=[length] reward.length_min_tokens=1025", "no completion would be long enough"),
        ("rollout.max_new_tokens=8 reward.overlong_buffer_tokens=9", "longer than"),
        ("reward.overlong_buffer_tokens=9 loss.mask_truncated=true", "does not train on the longest"),
    ],
)
def test_it_is_refused_with_a_reason_and_a_remedy(words, reason):
    (violation,) = violations(words)
    assert reason in violation
    assert any(word in violation.replace(".", " ").split() for word in REMEDIES), violation


def test_paper_values_follow_the_kind_of_loss():
    gspo = load_config(RlConfig, None, ["loss.kind=gspo"]).loss
    assert (gspo.clip, gspo.aggregation_in_use) == ((3e-4, 4e-4), "seq_mean_token_mean")
    grpo = load_config(RlConfig, None, ["loss.clip_high=0.28"]).loss
    assert (grpo.clip, grpo.aggregation_in_use) == ((0.2, 0.28), "seq_mean_token_mean")
    assert load_config(RlConfig, None, ["loss.kind=cispo"]).loss.aggregation_in_use == "token_mean"


def test_dapo_and_cispo_are_their_papers():
    dapo, cispo = (load_config(RlRunConfig, Path(f"tiny_moe/{name}")).rl for name in ("dapo", "cispo"))
    assert (dapo.loss.clip, dapo.loss.aggregation_in_use, dapo.loss.kl_coeff) == ((0.2, 0.28), "token_mean", 0)
    assert dapo.rollout.dynamic_sampling and dapo.reward.overlong_buffer_tokens
    assert (cispo.loss.kind, cispo.loss.aggregation_in_use) == ("cispo", "token_mean")


def test_dr_grpo_is_divided_by_neither_length_nor_spread():
    config = load_config(RlRunConfig, Path("tiny_moe/dr_grpo")).rl
    assert (config.loss.aggregation_in_use, config.advantage.kind) == ("seq_mean_token_sum_norm", "mean")
