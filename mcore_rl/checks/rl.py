"""Checks that the settings of the section `rl` are compatible, and do what their names say."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from mcore_rl.checks.model import unused
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
    SELF,
    Aggregated,
    AnyLoss,
    Clipped,
    DividedAdvantage,
    DualClipped,
    GaeAdvantage,
    PtxConfig,
    Shifted,
    UpdateConfig,
)
from mcore_rl.config.rl.rollout import ENVIRONMENT_PART, MIN_TEMPERATURE, PromptConfig, RewardConfig
from mcore_rl.config.rl_run import RlConfig
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
    yield from _rollout(rl)
    yield from _staleness(rl)
    yield from _advantage(rl)
    yield from _loss(rl)
    yield from _kl(rl.loss)
    yield from _importance_sampling(rl.loss, rl.update)
    yield from _distill(rl)
    yield from _ptx(rl.ptx)
    yield from _parts(rl.reward)
    yield from _part_options(rl.reward)
    yield from _servers(rl.reward)
    yield from _lengths(rl)
    yield from _environment(rl)
    yield from _agent(rl)


def _prompts(prompts: PromptConfig) -> Iterator[str]:
    task, files = prompts.task, prompts.files
    if task == "file" and not files:
        yield 'rl.prompts.task="file", but rl.prompts.files is empty. Name JSONL files, or set a built-in task.'
    yield from unused("rl.prompts", prompts, (task != "file", "files", f'rl.prompts.task="{task}"'))
    yield from weight_violations("rl.prompts.file_weights", prompts.file_weights, "rl.prompts.files", files)
    if prompts.smallest > prompts.largest:
        yield f"rl.prompts.smallest={prompts.smallest} is above rl.prompts.largest={prompts.largest}. Lower it."
    if task == "countdown" and not 2 <= prompts.smallest <= prompts.largest <= 6:
        yield (
            f'rl.prompts.smallest={prompts.smallest} and largest={prompts.largest} with task="countdown", '
            "which has 2 to 6 numbers. Set both within."
        )


def _rollout(rl: RlConfig) -> Iterator[str]:
    rollout, advantage, size = rl.rollout, rl.advantage, rl.rollout.group_size
    if rollout.temperature == 0:
        yield (
            "rl.rollout.temperature=0 makes all completions of a group the same, so that none is better. Set "
            "it above 0 (1.0 samples from the policy itself)."
        )
    elif rollout.temperature < MIN_TEMPERATURE:
        yield f"rl.rollout.temperature={rollout.temperature} is below {MIN_TEMPERATURE}. Set it higher."
    if "" in rollout.stop_strings:
        yield "rl.rollout.stop_strings holds an empty text, which every completion ends in. Take it out."
    ddof = f" (ddof={advantage.ddof})" if isinstance(advantage, DividedAdvantage) else ""
    fewest = 3 if advantage.kind == "leave_one_out_zscore" and ddof.endswith("1)") else 2
    if advantage.compares_group and size < fewest:
        yield (
            f'rl.rollout.group_size={size} with rl.advantage.kind="{advantage.kind}"{ddof}: every advantage would be 0 '
            f"or undefined. Set group_size to at least {fewest}."
        )
    if not rollout.dynamic_sampling:
        yield from unused("rl.rollout", rollout, (True, "dynamic_sampling_by", "rl.rollout.dynamic_sampling=false"))
        return
    if rollout.dynamic_sampling_by == "accuracy" and rl.reward.correct_part is None:
        yield (
            'rl.rollout.dynamic_sampling_by="accuracy", and no part of rl.reward.parts='
            f"{list(rl.reward.parts)} decides which completions are correct. Name one as rl.reward.correct, or set it "
            'to "reward".'
        )
    reasons = {
        'rl.advantage.kind="remax": a group of equal rewards has a signal there, by its distance from the greedy '
        "completion's": advantage.kind == "remax",
        'rl.advantage.kind="steps": groups are chosen by whole rewards, which may differ where steps do '
        "not": advantage.kind == "steps",
        'rl.advantage.rewards_at="steps": groups are chosen by whole rewards, which may differ where steps do '
        "not": advantage.is_of_tokens and advantage.uses_steps,
        f"rl.rollout.group_size={size}: in a group of one all rewards are the same, and every group would be "
        "replaced": size < 2 and advantage.is_of_tokens and not advantage.compares_group,
        f"rl.rollout.max_staleness={rollout.max_staleness}: a rollout batch is refilled after its rewards are known, "
        "when the groups of later ones are in progress already": rollout.max_staleness > 0,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"rl.rollout.dynamic_sampling=true with {reason}. Set it to false, or change that."


def _advantage(rl: RlConfig) -> Iterator[str]:
    advantage, loss = rl.advantage, rl.loss
    if loss.kind == "kimi_k2" and advantage.kind != "mean":
        yield (
            f'rl.loss.kind="kimi_k2" with rl.advantage.kind="{advantage.kind}": its regression is on r - '
            'mean(r), and tau is in units of the reward. Set rl.advantage.kind="mean".'
        )
    if loss.kind in ADVANTAGE_OF_SEQUENCE and (advantage.kind == "steps" or advantage.is_of_tokens):
        yield (
            f'rl.advantage.kind="{advantage.kind}" with rl.loss.kind="{loss.kind}", which has one advantage a '
            'sequence. Set rl.loss.kind="gspo_token", "grpo", "cispo" or "ppo".'
        )
    if advantage.kind == "steps" and loss.has_kl_in_reward:
        yield (
            'rl.loss.kl_in="reward" with rl.advantage.kind="steps": a KL summed over a completion is of no step. '
            'Set kl_in="loss".'
        )
    if advantage.kind == "gdpo" and loss.has_kl_in_reward:
        yield (
            'rl.loss.kl_in="reward" with rl.advantage.kind="gdpo": a KL is none of the reward\'s parts, which are '
            'compared one by one. Set kl_in="loss".'
        )
    if isinstance(advantage, GaeAdvantage):
        cause = f"rl.advantage.gae_lambda={advantage.gae_lambda}"
        yield from unused("rl.advantage", advantage, (advantage.gae_lambda != "length", "length_alpha", cause))
        if advantage.bootstrap_truncated and loss.mask_truncated:
            yield (
                "rl.advantage.bootstrap_truncated=true with rl.loss.mask_truncated=true, which trains on no truncated "
                "completion. Set one of them to false."
            )


def _loss(rl: RlConfig) -> Iterator[str]:
    loss = rl.loss
    if isinstance(loss, Clipped) and loss.clip.low >= 1 and loss.kind != "cispo":
        falls = "probability falls by" if loss.kind == "dppo_tv" else "ratio is below 1 -"
        yield f"rl.loss.clip_low={loss.clip_low}: no {falls} {loss.clip_low}, so nothing is clipped. Set it below 1."
    if isinstance(loss, DualClipped) and loss.dual_clip and loss.dual_clip <= 1 + loss.clip.high:
        yield (
            f"rl.loss.dual_clip={loss.dual_clip} is not above the upper clip 1 + {loss.clip.high}: it would "
            'cut ratios that are not clipped. Set it higher (3), or to "none".'
        )
    if isinstance(loss, Aggregated):
        is_mean = loss.aggregation != "seq_mean_token_sum_norm"
        rule = (is_mean, "aggregation_norm_tokens", f'rl.loss.aggregation="{loss.aggregation}"')
        yield from unused("rl.loss", loss, rule)
    if isinstance(loss, Shifted):
        rule = (not loss.router_shift, "router_shift_floor", "rl.loss.router_shift=false")
        yield from unused("rl.loss", loss, rule)
        if loss.router_shift and rl.update.old_logprobs == "rollout":
            yield (
                'rl.loss.router_shift with rl.update.old_logprobs="rollout": the old routers\' scores are recorded in '
                'the trainer\'s pass for old logprobs, which this omits. Set old_logprobs="trainer".'
            )


def _distill(rl: RlConfig) -> Iterator[str]:
    distill, loss = rl.distill, rl.loss
    if not distill.paths:
        yield from unused("rl.distill", distill, (True, "", 'rl.distill.teacher="none": there is no teacher'))
        if rl.advantage.kind == "zero" and not (loss.kl_coeff or loss.entropy_coeff):
            yield (
                'rl.advantage.kind="zero" without rl.distill.teacher, rl.loss.kl_coeff or entropy_coeff: nothing moves '
                "the policy. Set one of them, or another kind."
            )
        return
    no_self = (SELF not in distill.paths, "self_refresh_rollouts", f'teachers of which none is "{SELF}"')
    yield from unused("rl.distill", distill, no_self)
    if distill.estimator == "vocabulary" and distill.use == "advantage":
        yield (
            'rl.distill.estimator="vocabulary" with use="advantage": a KL over the vocabulary is of no sampled token, '
            'and its advantage would have the mean 0. Set use="loss", or estimator="token".'
        )
    if distill.use == "advantage" and loss.kind in ("gspo", "kimi_k2"):
        yield (
            f'rl.distill.use="advantage" with rl.loss.kind="{loss.kind}", which has one advantage a sequence. Set '
            'rl.loss.kind="grpo", "ppo", "cispo" or "gspo_token", or use="loss".'
        )
    if "" in distill.teachers:
        yield "rl.distill.teachers has an empty tag. Name it."
    yield from unused(
        "rl.distill",
        distill,
        (not distill.served, "server tokenizer", "teachers of which none is on a server"),
        (not distill.forward_weight, "top_k", "rl.distill.forward_weight=0"),
        (len(distill.served) == len(distill.paths), "store", "teachers on servers alone"),
    )
    for url in distill.served.values():
        yield from _address(f'the teacher of rl.distill, "{url}",', url)
    if distill.forward_weight and len(distill.served) < len(distill.paths):
        yield (
            f"rl.distill.forward_weight={distill.forward_weight} with teachers that are not on servers, whose "
            'likeliest tokens are not kept. Set it to 0 (estimator="vocabulary" compares all tokens), or name servers.'
        )
    if distill.served and distill.estimator == "vocabulary":
        yield (
            'rl.distill.estimator="vocabulary" with a teacher on a server, which gives logprobs of few tokens. Set '
            'estimator="token", and rl.distill.forward_weight for its likeliest tokens.'
        )
    if distill.served and rl.rollout.temperature != 1.0:
        yield (
            f"rl.rollout.temperature={rl.rollout.temperature} with a teacher on a server, whose logprobs of a text are "
            "at temperature 1: the KL would be between other distributions. Set temperature=1."
        )


def _ptx(ptx: PtxConfig) -> Iterator[str]:
    if ptx.coeff and bool(ptx.files) == bool(ptx.tokens):
        yield (
            f"rl.ptx.coeff={ptx.coeff} with rl.ptx.files={list(ptx.files)} and tokens={list(ptx.tokens)}: texts are "
            "either conversations or tokens. Name one of the two, or set coeff=0."
        )
    yield from unused("rl.ptx", ptx, (not ptx.coeff, "", "rl.ptx.coeff=0, which mixes no texts in"))


def _kl(loss: AnyLoss) -> Iterator[str]:
    no_reference = "rl.loss.kl_coeff=0: there is no reference"
    yield from unused(
        "rl.loss",
        loss,
        (loss.kl_target is None, "kl_horizon", 'rl.loss.kl_target="none"'),
        (not loss.kl_coeff, "kl_target", "rl.loss.kl_coeff=0, which no factor changes (1909.08593 begins at 0.2)"),
        (not loss.kl_coeff, "kl_to reference_refresh_rollouts reference_store", no_reference),
        (
            loss.kl_to == "old",
            "kl_target reference_refresh_rollouts reference_store",
            'rl.loss.kl_to="old", the policy that sampled, from which every rollout batch starts anew',
        ),
    )
    if loss.has_kl_in_reward and loss.kl_to == "old":
        yield 'rl.loss.kl_to="old" with kl_in="reward", where the old policy is its own KL: 0. Set kl_in="loss".'
    if loss.kl_coeff and loss.kl_in == "loss" and loss.kl_estimator == "k1" and loss.kl_gradient == "estimator":
        yield (
            'rl.loss.kl_estimator="k1" in the loss with its own gradient, whose mean is 0: it pulls nowhere and '
            'adds noise. Set kl_gradient="k2", another estimator, or kl_in="reward".'
        )
    if loss.has_kl_in_reward and loss.kl_gradient == "k2":
        yield (
            'rl.loss.kl_gradient="k2" with rl.loss.kl_in="reward", where there is no gradient. Set "estimator", or '
            'kl_in="loss".'
        )


def _importance_sampling(loss: AnyLoss, update: UpdateConfig) -> Iterator[str]:
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
    staleness = rl.rollout.max_staleness
    if not staleness:
        return
    field = f"rl.rollout.max_staleness={staleness}"
    if rl.engine.kind == "native":
        yield (
            f'{field} with rl.engine.kind="native", whose modules train or generate, not both at once. Set '
            "max_staleness=0, or the kind of an inference server."
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
    parts, named = reward.parts, f"rl.reward.parts={toml_value(reward.parts)}"
    has_steps = any(part.startswith(STEP_MODEL_PART) for part in parts)
    has_scores = any(part.startswith(MODEL_PART) for part in parts)
    has_judge = any(part.startswith(JUDGE_PART) for part in parts)
    of_models = "model_store model_tokenizer model_chat_template"
    yield from unused(
        "rl.reward",
        reward,
        (not reward.model_parts, of_models, f"{named}, which has no reward model"),
        (not has_scores, "normalize_models", f"{named}, which has no model:PATH (scores of steps are not normalised)"),
        (not has_steps, "step_separator step_value", f"{named}, which has no step_model:PATH"),
        ("format" not in parts, "format_pattern", f'{named}, which lacks "format"'),
        ("regex" not in parts, "regex_pattern", f'{named}, which lacks "regex"'),
        (not set(parts) & set(NEEDS_ANSWER), "answer_pattern", f"{named}, which has none of {', '.join(NEEDS_ANSWER)}"),
    )
    for key, section, is_used, part in (
        ("rl.reward.code", reward.code, "code" in parts, '"code"'),
        ("rl.reward.server", reward.server, bool(reward.served_parts), "a server (http:URL, judge:FILE)"),
        ("rl.reward.judge", reward.judge, has_judge, "judge:FILE"),
    ):
        yield from unused(key, section, (not is_used, "", f"{named}, which lacks {part}"))
    for part, pattern in (("format", reward.format_pattern), ("regex", reward.regex_pattern)):
        if part in parts and not pattern:
            yield f'rl.reward.parts names "{part}", but rl.reward.{part}_pattern is not set. Set it.'
        yield from _pattern(f"rl.reward.{part}_pattern", pattern, groups=0)
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
    judge = next((part for part in reward.parts if part.startswith(JUDGE_PART)), None)
    for name in ("url", "model") if judge else ():
        if getattr(reward.judge, name) is None:
            yield f'rl.reward.parts names "{judge}", and rl.reward.judge.{name} is not set. Set it.'
    if judge and reward.judge.url is not None:
        yield from _address(f'rl.reward.judge.url="{reward.judge.url}"', reward.judge.url)
    yield from _pattern("rl.reward.judge.score_pattern", reward.judge.score_pattern, groups=1)
    if "code" in reward.parts and reward.code.timeout_s >= reward.timeout_s:
        yield (
            f"rl.reward.code.timeout_s={reward.code.timeout_s:g} is not below rl.reward.timeout_s="
            f"{reward.timeout_s:g}, at which a score has failed instead of being 0. Lower it, or raise that."
        )


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


def completion_field(rl: RlConfig) -> str:
    """Return the field with the maximum number of tokens after a prompt."""
    if rl.agent.is_on:
        return "rl.agent.max_tokens"
    return "rl.rollout.max_new_tokens" if rl.environment.name is None else "rl.environment.max_tokens"


def _lengths(rl: RlConfig) -> Iterator[str]:
    reward, field, limit = rl.reward, completion_field(rl), rl.max_completion_tokens
    buffer = reward.overlong_buffer_tokens
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


def _agent(rl: RlConfig) -> Iterator[str]:
    agent = rl.agent
    if not agent.is_on:
        yield from unused("rl.agent", agent, (True, "", "rl.agent without function and command"))
        return
    if agent.function is not None and agent.command:
        yield (
            f'rl.agent.function="{agent.function}" with rl.agent.command={list(agent.command)}: a session runs one of '
            "them. Take one out."
        )
    if rl.environment.name is not None:
        yield (
            f'rl.agent with rl.environment.name="{rl.environment.name}": an agent answers the policy itself. Take one '
            "of them out."
        )
    if ENVIRONMENT_PART not in rl.reward.parts:
        yield (
            f'rl.agent is set, and rl.reward.parts={list(rl.reward.parts)} lacks "{ENVIRONMENT_PART}", the reward that '
            "the agent returns and the account of its failures. Name it there (rl.reward.weights may give it 0)."
        )
    if agent.max_tokens < rl.rollout.max_new_tokens:
        yield (
            f"rl.agent.max_tokens={agent.max_tokens} has no room for one answer of rl.rollout.max_new_tokens="
            f"{rl.rollout.max_new_tokens} tokens. Set it higher, or shorten answers."
        )
    if (
        rl.advantage.kind in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        and agent.branches == "train"
    ):
        yield (
            f'rl.advantage.kind="{rl.advantage.kind}" with rl.agent.branches="train": its returns run from token to '
            'token, and segments do not follow each other. Set branches="fail", or another kind.'
        )


def _environment(rl: RlConfig) -> Iterator[str]:
    environment, name = rl.environment, rl.environment.name
    has_part = ENVIRONMENT_PART in rl.reward.parts
    if name is None:
        yield from unused("rl.environment", environment, (True, "", 'rl.environment.name="none"'))
        if has_part and not rl.agent.is_on:
            yield (
                f'rl.reward.parts names "{ENVIRONMENT_PART}", but rl.environment.name is not set. Name an environment, '
                "or take the part out."
            )
        if rl.prompts.task == "seeds" and not rl.agent.is_on:
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
