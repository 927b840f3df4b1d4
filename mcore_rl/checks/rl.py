"""Checks that the settings of the section `rl` are compatible, and do what their names say."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from mcore_rl.checks.run import weight_violations
from mcore_rl.config.extension import (
    HTTP_PARTS,
    JUDGE_PART,
    MODEL_PART,
    MODEL_PARTS,
    STEP_MODEL_PART,
    is_extension,
    server_url,
)
from mcore_rl.config.rl.loss import (
    Aggregated,
    AnyAdvantage,
    AnyLoss,
    Clipped,
    DiscountedAdvantage,
    DistillConfig,
    DividedAdvantage,
    DualClipped,
    GaeAdvantage,
    GrpoLoss,
    PtxConfig,
    Shifted,
    UpdateConfig,
)
from mcore_rl.config.rl.rollout import (
    ENVIRONMENT_PART,
    MIN_TEMPERATURE,
    CodeConfig,
    EnvironmentConfig,
    JudgeConfig,
    PromptConfig,
    RewardConfig,
    RewardServerConfig,
    RolloutConfig,
)
from mcore_rl.config.rl_run import RlConfig
from mcore_rl.config.section import Section
from mcore_rl.config.toml import toml_value

ADVANTAGE_OF_SEQUENCE = ("gspo", "rspo")
NAMED_PARTS = (
    "exact",
    "positions",
    "numeric",
    "math",
    "countdown",
    "code",
    "format",
    "regex",
    "length",
    ENVIRONMENT_PART,
)
NEEDS_ANSWER = ("exact", "positions", "numeric", "math", "countdown", "code")
"""Parts that look for an answer in a completion, with rl.reward.answer_pattern."""
TOOLS = ("calculator", "python")
"""Environments that help with problems from another source."""
MAKERS = ("guessing", "reasoning_gym", "textarena")
"""Environments that make a problem from a prompt's fields `seed` and `size`."""


def rl_violations(rl: RlConfig) -> Iterator[str]:
    """Yield a sentence for each reason why `rl` cannot be run as it is."""
    yield from _prompts(rl.prompts)
    yield from _sampling(rl.rollout)
    yield from _group(rl.rollout, rl.advantage)
    yield from _dynamic_sampling(rl)
    yield from _objective(rl.loss)
    yield from _router_shift(rl)
    yield from _kimi(rl.loss, rl.advantage)
    yield from _steps(rl)
    yield from _token_advantages(rl)
    yield from _distill(rl)
    yield from _ptx(rl.ptx)
    yield from _kl(rl.loss)
    yield from _importance_sampling(rl.loss, rl.update)
    yield from _staleness(rl)
    yield from _parts(rl.reward)
    yield from _part_options(rl.reward)
    yield from _code(rl.reward)
    yield from _servers(rl.reward)
    yield from _overlong(rl.reward, rl)
    yield from _environment(rl)


def _prompts(prompts: PromptConfig) -> Iterator[str]:
    if prompts.task == "file" and not prompts.files:
        yield ('rl.prompts.task="file", but rl.prompts.files is empty. Name JSONL files, or set a built-in task.')
    if prompts.task != "file" and prompts.files:
        yield (
            f'rl.prompts.files={list(prompts.files)} is not read with rl.prompts.task="{prompts.task}". Clear '
            'it, or set task="file".'
        )
    yield from weight_violations(
        "rl.prompts.file_weights",
        prompts.file_weights,
        "rl.prompts.files",
        prompts.files,
        "files",
        "to read every prompt once an epoch",
    )
    if prompts.smallest > prompts.largest:
        yield (f"rl.prompts.smallest={prompts.smallest} is above rl.prompts.largest={prompts.largest}. Lower it.")
    if prompts.task == "countdown" and not 2 <= prompts.smallest <= prompts.largest <= 6:
        yield (
            f'rl.prompts.smallest={prompts.smallest} and largest={prompts.largest} with task="countdown", '
            "which has 2 to 6 numbers. Set both within."
        )


def _sampling(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.temperature == 0:
        yield (
            "rl.rollout.temperature=0 makes all completions of a group the same, so that none is better. Set "
            "it above 0 (1.0 samples from the policy itself)."
        )
    elif rollout.temperature < MIN_TEMPERATURE:
        yield f"rl.rollout.temperature={rollout.temperature} is below {MIN_TEMPERATURE}. Set it higher."
    if "" in rollout.stop_strings:
        yield "rl.rollout.stop_strings holds an empty text, which every completion ends in. Take it out."


def _dynamic_sampling(rl: RlConfig) -> Iterator[str]:
    by = rl.rollout.dynamic_sampling_by
    if by != "auto" and not rl.rollout.dynamic_sampling:
        yield (
            f'rl.rollout.dynamic_sampling_by="{by}" is not used with rl.rollout.dynamic_sampling=false. Leave it at '
            '"auto".'
        )
    elif by == "accuracy" and rl.reward.correct_part is None:
        yield (
            'rl.rollout.dynamic_sampling_by="accuracy", and no part of rl.reward.parts='
            f"{list(rl.reward.parts)} decides which completions are correct. Name one as rl.reward.correct, or set it "
            'to "reward".'
        )


def _group(rollout: RolloutConfig, advantage: AnyAdvantage) -> Iterator[str]:
    if advantage.kind == "remax" and rollout.dynamic_sampling:
        yield (
            'rl.rollout.dynamic_sampling=true with rl.advantage.kind="remax": a group of equal rewards has a signal '
            "there, by its distance from the greedy completion's. Set it to false."
        )
    if not advantage.compares_group:
        if rollout.dynamic_sampling and rollout.group_size < 2 and advantage.is_of_tokens:
            yield (
                f"rl.rollout.dynamic_sampling=true with rl.rollout.group_size={rollout.group_size}: in a group of one "
                "all rewards are the same, and every group would be replaced. Set group_size to at least 2, or "
                "dynamic_sampling=false."
            )
        return
    ddof = f" (ddof={advantage.ddof})" if isinstance(advantage, DividedAdvantage) else ""
    fewest = 3 if advantage.kind == "leave_one_out_zscore" and ddof.endswith("1)") else 2
    if rollout.group_size < fewest:
        yield (
            f'rl.rollout.group_size={rollout.group_size} with rl.advantage.kind="{advantage.kind}"'
            f"{ddof}: every advantage would be 0 or undefined. Set group_size to at least "
            f"{fewest}."
        )


def _objective(loss: AnyLoss) -> Iterator[str]:
    if isinstance(loss, Clipped) and loss.clip.low >= 1 and loss.kind != "cispo":
        yield (
            f"rl.loss.clip_low={loss.clip_low}: no ratio is below 1 - {loss.clip_low}, so nothing is clipped. "
            "Set it below 1."
        )
    if isinstance(loss, DualClipped) and loss.dual_clip and loss.dual_clip <= 1 + loss.clip.high:
        yield (
            f"rl.loss.dual_clip={loss.dual_clip} is not above the upper clip 1 + {loss.clip.high}: it would "
            'cut ratios that are not clipped. Set it higher (3), or to "none".'
        )
    if isinstance(loss, Aggregated) and loss.norm_tokens and loss.aggregation != "seq_mean_token_sum_norm":
        yield (
            f"rl.loss.aggregation_norm_tokens={loss.aggregation_norm_tokens} is not used with "
            f'rl.loss.aggregation="{loss.aggregation}". Leave it at "auto", or set "seq_mean_token_sum_norm".'
        )


def _router_shift(rl: RlConfig) -> Iterator[str]:
    loss = rl.loss
    if not isinstance(loss, Shifted):
        return
    if not loss.router_shift:
        default = type(loss).model_fields["router_shift_floor"].default
        if loss.router_shift_floor != default:
            yield (
                f"rl.loss.router_shift_floor={loss.router_shift_floor} is not used without rl.loss.router_shift. Leave "
                f"it at {default}, or set router_shift=true."
            )
        return
    if rl.update.old_logprobs == "rollout":
        yield (
            'rl.loss.router_shift with rl.update.old_logprobs="rollout": the old routers\' scores are recorded in the '
            'trainer\'s pass for old logprobs, which this omits. Set old_logprobs="trainer".'
        )


def _kimi(loss: AnyLoss, advantage: AnyAdvantage) -> Iterator[str]:
    if loss.kind != "kimi_k2":
        return
    if advantage.kind != "mean":
        yield (
            f'rl.loss.kind="kimi_k2" with rl.advantage.kind="{advantage.kind}": its regression is on r - '
            'mean(r), and tau is in units of the reward. Set rl.advantage.kind="mean".'
        )


def _steps(rl: RlConfig) -> Iterator[str]:
    if rl.advantage.kind != "steps":
        return
    if rl.loss.kind in ADVANTAGE_OF_SEQUENCE:
        yield (
            f'rl.advantage.kind="steps" with rl.loss.kind="{rl.loss.kind}", which has one advantage a sequence. Set '
            'rl.loss.kind="gspo_token", "grpo" or "cispo".'
        )
    if rl.loss.kl_coeff and rl.loss.kl_in == "reward":
        yield (
            'rl.loss.kl_in="reward" with rl.advantage.kind="steps": a KL summed over a completion is of no step. '
            'Set kl_in="loss".'
        )
    if rl.rollout.dynamic_sampling:
        yield (
            'rl.rollout.dynamic_sampling=true with rl.advantage.kind="steps": groups are chosen by whole rewards, '
            "which may differ where steps do not. Set it to false."
        )


def _token_advantages(rl: RlConfig) -> Iterator[str]:
    """Check the advantages that differ between the tokens of a completion."""
    advantage = rl.advantage
    if isinstance(advantage, GaeAdvantage):
        default = GaeAdvantage().length_alpha
        if advantage.gae_lambda != "length" and advantage.length_alpha != default:
            yield (
                f"rl.advantage.length_alpha={advantage.length_alpha} is not used with "
                f"rl.advantage.gae_lambda={advantage.gae_lambda}. Leave it at {default}."
            )
        if advantage.bootstrap_truncated and rl.loss.mask_truncated:
            yield (
                "rl.advantage.bootstrap_truncated=true with rl.loss.mask_truncated=true, which trains on no truncated "
                "completion. Set one of them to false."
            )
    if not isinstance(advantage, DiscountedAdvantage):
        return
    if rl.loss.kind in ADVANTAGE_OF_SEQUENCE:
        yield (
            f'rl.advantage.kind="{advantage.kind}" with rl.loss.kind="{rl.loss.kind}", which has one advantage a '
            'sequence. Set rl.loss.kind="ppo", "grpo", "cispo" or "gspo_token".'
        )
    if advantage.uses_steps and rl.rollout.dynamic_sampling:
        yield (
            'rl.rollout.dynamic_sampling=true with rl.advantage.rewards_at="steps": groups are chosen by whole '
            "rewards, which may differ where steps do not. Set it to false."
        )


def _distill(rl: RlConfig) -> Iterator[str]:
    distill, default = rl.distill, DistillConfig()
    if not distill.paths:
        changed = [name for name in DistillConfig.model_fields if getattr(distill, name) != getattr(default, name)]
        if changed:
            yield (
                f"{', '.join(f'rl.distill.{name}' for name in changed)}: there is no teacher. Name rl.distill.teacher "
                "or teachers, or clear the section rl.distill."
            )
        if rl.advantage.kind == "zero" and not (rl.loss.kl_coeff or rl.loss.entropy_coeff):
            yield (
                'rl.advantage.kind="zero" without rl.distill.teacher, rl.loss.kl_coeff or entropy_coeff: nothing moves '
                "the policy. Set one of them, or another kind."
            )
        return
    if distill.estimator == "vocabulary" and distill.use == "advantage":
        yield (
            'rl.distill.estimator="vocabulary" with use="advantage": a KL over the vocabulary is of no sampled token, '
            'and its advantage would have the mean 0. Set use="loss", or estimator="token".'
        )
    if distill.self_refresh_rollouts is not None and not distill.has_self:
        yield (
            f'rl.distill.self_refresh_rollouts={distill.self_refresh_rollouts}: no teacher is "self". Set it to "none".'
        )
    if distill.use == "advantage" and rl.loss.kind in ("gspo", "kimi_k2"):
        yield (
            f'rl.distill.use="advantage" with rl.loss.kind="{rl.loss.kind}", which has one advantage a sequence. Set '
            'rl.loss.kind="grpo", "ppo", "cispo" or "gspo_token", or use="loss".'
        )
    if "" in distill.teachers:
        yield "rl.distill.teachers has an empty tag. Name it."


def _ptx(ptx: PtxConfig) -> Iterator[str]:
    named = [name for name in ("files", "tokens") if getattr(ptx, name)]
    if ptx.coeff and len(named) != 1:
        yield (
            f"rl.ptx.coeff={ptx.coeff} with rl.ptx.files={list(ptx.files)} and tokens={list(ptx.tokens)}: texts are "
            "either conversations or tokens. Name one of the two, or set coeff=0."
        )
    changed = [*named, *(["sequences"] if ptx.sequences != PtxConfig().sequences else [])]
    if changed and not ptx.coeff:
        yield (
            f"{', '.join(f'rl.ptx.{name}' for name in changed)}: rl.ptx.coeff=0 mixes no texts in. Set coeff, or clear "
            "the section rl.ptx."
        )


def _kl(loss: AnyLoss) -> Iterator[str]:
    if loss.kl_target is None and loss.kl_horizon != GrpoLoss().kl_horizon:
        yield (
            f'rl.loss.kl_horizon={loss.kl_horizon} is not used with rl.loss.kl_target="none". Set kl_target, or leave '
            f"it at {GrpoLoss().kl_horizon}."
        )
    if not loss.kl_coeff:
        if loss.kl_target is not None:
            yield (
                f"rl.loss.kl_target={loss.kl_target} with rl.loss.kl_coeff=0, which no factor changes. Set kl_coeff to "
                'where the controller is to begin (0.2 in 1909.08593), or kl_target to "none".'
            )
        if loss.reference_refresh_rollouts:
            yield (
                f"rl.loss.reference_refresh_rollouts={loss.reference_refresh_rollouts}, but rl.loss.kl_coeff=0: "
                'there is no reference. Set kl_coeff, or this to "none".'
            )
        if loss.reference_store != "host":
            yield (
                f'rl.loss.reference_store="{loss.reference_store}", but rl.loss.kl_coeff=0: there is no reference. Set '
                'kl_coeff, or this to "host".'
            )
        return
    if loss.kl_in == "loss" and loss.kl_estimator == "k1" and loss.kl_gradient == "estimator":
        yield (
            'rl.loss.kl_estimator="k1" in the loss with its own gradient, whose mean is 0: it pulls nowhere and '
            'adds noise. Set kl_gradient="k2", another estimator, or kl_in="reward".'
        )
    if loss.kl_in == "reward" and loss.kl_gradient == "k2":
        yield (
            'rl.loss.kl_gradient="k2" with rl.loss.kl_in="reward", where there is no gradient. Set "estimator", or '
            'kl_in="loss".'
        )


def _importance_sampling(loss: AnyLoss, update: UpdateConfig) -> Iterator[str]:
    """Check the correction for rollouts with logprobs that differ from the trainer's."""
    if loss.correction is None:
        return
    kind, low, high = loss.correction
    if kind.endswith("mask") and not low < 1 < high:
        yield (
            f"rl.loss.importance_sampling_low={low} ... importance_sampling_high={high} does not hold 1, the weight "
            "where engine and trainer agree. Set low below and high above it."
        )
    elif update.old_logprobs == "rollout":
        yield (
            f'rl.loss.importance_sampling="{kind}" with rl.update.old_logprobs="rollout": the old logprobs are the '
            'engine\'s, so that every weight is 1 and nothing is corrected. Set importance_sampling="none", or '
            'old_logprobs="trainer".'
        )
    elif kind.endswith("truncate") and high < 1:
        yield (
            f"rl.loss.importance_sampling_high={high} truncates weights of tokens on which engine and trainer agree. "
            "Set it to 1 or more."
        )


def _staleness(rl: RlConfig) -> Iterator[str]:
    """Check that samples of older weights come from a separate engine, and are corrected for."""
    staleness = rl.rollout.max_staleness
    if not staleness:
        return
    field = f"rl.rollout.max_staleness={staleness}"
    if rl.engine.kind == "native":
        yield (
            f'{field} with rl.engine.kind="native", whose modules train or generate, not both at once. Set '
            "max_staleness=0, or the kind of an inference server."
        )
    if rl.rollout.dynamic_sampling:
        yield (
            f"{field} with rl.rollout.dynamic_sampling=true: a rollout batch is refilled after its rewards are known, "
            "when the groups of later ones are in progress already. Set one of them to 0 or false."
        )
    is_corrected = rl.loss.correction is not None or rl.loss.kind == "kimi_k2"
    if rl.update.old_logprobs == "rollout":
        if staleness > 1:
            yield (
                f'{field} with rl.update.old_logprobs="rollout": the clip would bound how far the policy has moved '
                "since several rollout batches ago, and cut off most of what is new. Set "
                'old_logprobs="trainer" with rl.loss.importance_sampling, or max_staleness=1.'
            )
    elif not is_corrected:
        kind = "sequence_truncate" if rl.loss.kind in ADVANTAGE_OF_SEQUENCE else "truncate"
        yield (
            f'{field} with rl.loss.importance_sampling="none": the ratio starts at the policy in training, and nothing '
            "weighs that older weights sampled the tokens: the gradient would be biased. Set "
            f'rl.loss.importance_sampling="{kind}"'
            + (', or rl.update.old_logprobs="rollout", whose ratio starts at the sampler.' if staleness == 1 else ".")
        )


def _parts(reward: RewardConfig) -> Iterator[str]:
    if not reward.parts:
        yield f"rl.reward.parts is empty. Name some of {', '.join(NAMED_PARTS)} or `module:function`."
    if len(set(reward.parts)) < len(reward.parts):
        yield f"rl.reward.parts={list(reward.parts)} names a part twice. Take one out and change its weight."
    for part in reward.parts:
        if part.startswith(HTTP_PARTS):
            yield from _address(f'rl.reward.parts="{part}"', server_url(part))
        elif part == JUDGE_PART:
            yield f'rl.reward.parts names "{part}" without a file. Name the template of what the judge is asked.'
        elif part.startswith(JUDGE_PART):
            continue
        elif part in MODEL_PARTS:
            yield f'rl.reward.parts names "{part}" without a path. Name a checkpoint or run of a reward model.'
        elif part not in NAMED_PARTS and part not in reward.model_parts and not is_extension(part):
            yield (
                f'rl.reward.parts names "{part}". Name one of {", ".join(NAMED_PARTS)}, a reward model as '
                "`model:PATH` or `step_model:PATH`, a server as `http:URL` or `judge:FILE`, or a function of yours as "
                "`package.module:function`."
            )
    if reward.correct not in (None, "auto", *reward.parts):
        yield (
            f'rl.reward.correct="{reward.correct}" is not among rl.reward.parts={list(reward.parts)}. Name it there '
            "too, with the weight 0 if it is not to be part of the reward."
        )
    if reward.weights and len(reward.weights) != len(reward.parts):
        yield (
            f"rl.reward.weights has {len(reward.weights)} numbers for {len(reward.parts)} parts. Give one each, "
            "or none for 1 each."
        )


def _part_options(reward: RewardConfig) -> Iterator[str]:
    parts = reward.parts
    if not reward.model_parts and (reward.normalize_models or reward.model_store != "host"):
        yield (
            f"rl.reward.normalize_models={toml_value(reward.normalize_models)} and "
            f'model_store="{reward.model_store}" are of reward models, and rl.reward.parts={list(parts)} has none. '
            'Leave them at false and "host".'
        )
    elif reward.normalize_models and not any(part.startswith(MODEL_PART) for part in parts):
        yield (
            f"rl.reward.normalize_models=true, and rl.reward.parts={list(parts)} has process reward models "
            "alone, whose scores of steps are not normalised. Leave it at false; "
            'rl.reward.step_value="probability" gives them a scale.'
        )
    default = RewardConfig()
    has_steps = any(part.startswith(STEP_MODEL_PART) for part in parts)
    for name, is_read in (
        ("step_separator", has_steps),
        ("step_value", has_steps),
        ("model_tokenizer", bool(reward.model_parts)),
        ("model_chat_template", bool(reward.model_parts)),
    ):
        if not is_read and getattr(reward, name) != getattr(default, name):
            what = "step_model:" if name.startswith("step") else "reward model"
            yield f"rl.reward.{name} is not used: rl.reward.parts={list(parts)} has no {what}. Leave it out."
    for part, pattern in (("format", reward.format_pattern), ("regex", reward.regex_pattern)):
        if part in parts and not pattern:
            yield f'rl.reward.parts names "{part}", but rl.reward.{part}_pattern is not set. Set it.'
        if part not in parts and pattern:
            yield f'rl.reward.{part}_pattern is not used: rl.reward.parts lacks "{part}". Name it, or clear it.'
        yield from _pattern(f"rl.reward.{part}_pattern", pattern, groups=0)
    if reward.answer_pattern and not any(part in NEEDS_ANSWER for part in parts):
        yield (
            f"rl.reward.answer_pattern is not used by rl.reward.parts={list(parts)}. Clear it, or name one of "
            f"{', '.join(NEEDS_ANSWER)}."
        )
    yield from _pattern("rl.reward.answer_pattern", reward.answer_pattern, groups=1)
    low, high = reward.length_min_tokens, reward.length_max_tokens
    if ("length" in parts) != bool(low or high):
        yield (
            f'rl.reward.length_min_tokens={low} and length_max_tokens={high} go with the part "length" in '
            f"rl.reward.parts={list(parts)}. Set at least one with it, neither without."
        )
    elif high and low > high:
        yield f"rl.reward.length_min_tokens={low} is above length_max_tokens={high}. Lower it."


def _address(name: str, url: str) -> Iterator[str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        yield f"{name} is no address of a server. Write http://HOST:PORT/PATH, without a query. Change it."


def _servers(reward: RewardConfig) -> Iterator[str]:
    judges = [part for part in reward.parts if part.startswith(JUDGE_PART)]
    if not reward.served_parts:
        reason = "rl.reward.parts names no server (http:URL, judge:FILE)"
        yield from _unused(reward.server, RewardServerConfig(), "rl.reward.server", reason)
    if not judges:
        yield from _unused(reward.judge, JudgeConfig(), "rl.reward.judge", "rl.reward.parts names no judge:FILE")
        return
    for name in ("url", "model"):
        if getattr(reward.judge, name) is None:
            yield f'rl.reward.parts names "{judges[0]}", and rl.reward.judge.{name} is not set. Set it.'
    if reward.judge.url is not None:
        yield from _address(f'rl.reward.judge.url="{reward.judge.url}"', reward.judge.url)
    yield from _pattern("rl.reward.judge.score_pattern", reward.judge.score_pattern, groups=1)


def _code(reward: RewardConfig) -> Iterator[str]:
    if "code" not in reward.parts:
        yield from _unused(reward.code, CodeConfig(), "rl.reward.code", 'rl.reward.parts lacks "code"')
    elif reward.code.timeout_s >= reward.timeout_s:
        yield (
            f"rl.reward.code.timeout_s={reward.code.timeout_s:g} is not below rl.reward.timeout_s="
            f"{reward.timeout_s:g}, at which a score has failed instead of being 0. Lower it, or raise that."
        )


def _unused(section: Section, default: Section, name: str, reason: str) -> Iterator[str]:
    """Yield a sentence if fields of `section` are set that nothing reads."""
    changed = [field for field in type(section).model_fields if getattr(section, field) != getattr(default, field)]
    if changed:
        fields = ", ".join(f"{name}.{field}" for field in changed)
        yield f"{fields}: not used, because {reason}. Clear the section {name}, or name the part."


def _pattern(name: str, pattern: str | None, *, groups: int) -> Iterator[str]:
    if pattern is None:
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        yield f"{name}={pattern!r} is no regular expression: {error}. Change it."
        return
    if compiled.groups < groups:
        yield f"{name}={pattern!r} has no group (...) around the answer. Make one."


def _overlong(reward: RewardConfig, rl: RlConfig) -> Iterator[str]:
    buffer, limit = reward.overlong_buffer_tokens, rl.max_completion_tokens
    field = "rl.rollout.max_new_tokens" if rl.environment.name is None else "rl.environment.max_tokens"
    if buffer is not None and buffer > limit:
        yield f"rl.reward.overlong_buffer_tokens={buffer} is longer than {field}={limit}. Shorten it."
    if reward.length_min_tokens and reward.length_min_tokens > limit:
        yield (
            f"rl.reward.length_min_tokens={reward.length_min_tokens} is longer than {field}={limit}: no completion "
            "would be long enough. Lower it."
        )
    if buffer and rl.loss.mask_truncated:
        yield (
            f"rl.reward.overlong_buffer_tokens={buffer} punishes long completions, and "
            "rl.loss.mask_truncated=true does not train on the longest. Choose one of them."
        )


def _environment(rl: RlConfig) -> Iterator[str]:
    environment, default, name = rl.environment, EnvironmentConfig(), rl.environment.name
    has_part = ENVIRONMENT_PART in rl.reward.parts
    if name is None:
        changed = [
            field for field in EnvironmentConfig.model_fields if getattr(environment, field) != getattr(default, field)
        ]
        if changed:
            yield (
                f"{', '.join(f'rl.environment.{field}' for field in changed)} without rl.environment.name. Name an "
                "environment, or clear them."
            )
        if has_part:
            yield (
                f'rl.reward.parts names "{ENVIRONMENT_PART}", but rl.environment.name is not set. Name an environment, '
                "or take the part out."
            )
        if rl.prompts.task == "seeds":
            yield (
                'rl.prompts.task="seeds" is for an environment that makes its own problems, and rl.environment.name is '
                "not set. Name one, or another task."
            )
        return
    if not has_part:
        yield (
            f'rl.environment.name="{name}", and rl.reward.parts={list(rl.reward.parts)} lacks "{ENVIRONMENT_PART}", '
            "the sum of its rewards and the account of its failures. Name it there (rl.reward.weights may give it 0)."
        )
    if name in TOOLS and rl.prompts.task == "seeds":
        yield (
            f'rl.prompts.task="seeds" with rl.environment.name="{name}", a tool that makes no problems. Name a task or '
            "files."
        )
    if name in MAKERS and rl.prompts.task not in ("seeds", "file"):
        yield (
            f'rl.prompts.task="{rl.prompts.task}" with rl.environment.name="{name}", which makes problems of its own. '
            'Set rl.prompts.task="seeds".'
        )
    if environment.max_tokens < rl.rollout.max_new_tokens:
        yield (
            f"rl.environment.max_tokens={environment.max_tokens} has no room for one turn of rl.rollout.max_new_tokens="
            f"{rl.rollout.max_new_tokens} tokens. Set it higher, or shorten turns."
        )
