"""The section `rl.loss`: the policy's loss and the terms added to it."""

from collections.abc import Mapping
from functools import cached_property
from math import exp
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import HTTP_PARTS, Extension, server_url
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.section import Seconds, Section, Store, Text


class UpdateConfig(Section):
    """How a rollout batch becomes updates of train.global_batch completions each."""

    epochs: PositiveInt = 1
    """Number of times that the run trains on each completion of a rollout batch."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of a forward pass on a replica, which holds whole completions with their prompts; `auto`: the length of
    the longest possible sample. Larger passes are faster and take more memory."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Source of the old policy's logprobs. `trainer`: a pass of the trainer with the weights of the rollout. `rollout`:
    the rollout itself, which saves that pass but leaves the engine's rounding in the ratio."""
    store: Store = "device"
    """Memory in which the policy's optimizer state waits between updates. `device`: the device's. `host`: main memory,
    and gradients take memory only during updates (on CPUs nothing moves). The weights stay on the device either way."""


class PtxConfig(Section):
    """Gradient of pretraining or fine-tuning in each update of the policy (PTX: 2203.02155; Kimi K2, 2507.20534)."""

    coeff: NonNegativeFloat = 0.0
    """Weight of the texts' cross entropy per token, which is added to the policy's loss; 0: no texts."""
    files: tuple[str, ...] = ()
    """Conversations, in the forms of fine-tuning's data.train; only the assistant's tokens count. Conversations longer
    than a packed sequence are left out."""
    tokens: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, as pretraining's data.train, instead of `files`; every token counts."""
    sequences: PositiveInt = 8
    """Number of packed sequences of texts per update, over all ranks, each as long as the policy's microbatches
    (rl.update.max_tokens_per_microbatch)."""


SELF = "self"
"""Name of the teacher that is an earlier state of the policy."""


class TeacherServerConfig(Section):
    """Inference servers that are teachers, and how each replica of the model requests logprobs from them."""

    kind: Literal["vllm", "sglang"] = "vllm"
    """Software of the servers."""
    concurrency: PositiveInt = 32
    """Number of requests that each replica has open at a time, each for one completion."""
    request_timeout_s: Seconds = 300.0
    """Seconds that a single request may take."""
    timeout_s: Seconds = 900.0
    """Seconds for which a request without a valid answer is repeated; after that the run ends."""
    api_key_env: Text | None = None
    """Name of the environment variable that holds the key, which is sent as a bearer token; `none`: no key."""
    ca_file: Text | None = None
    """File of the certificates that verify https servers; `none`: the system's certificates."""

    @property
    def update_timeout_s(self) -> float:
        """Seconds per request of any other kind."""
        return self.request_timeout_s


class DistillConfig(Section):
    """On-policy distillation (2306.13649): the policy learns from a teacher's logprobs on its own completions."""

    teacher: Text | None = None
    """Teacher of all prompts whose tag is not in `teachers`. A checkpoint, folder of checkpoints or run of a language
    model with the policy's tokenizer; the address of an inference server of such a model (`http://node7:8000`); or
    `self`, the policy as it was at the start. `none`: no teacher."""
    teachers: dict[str, Text] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Teachers by tag, such as {math = "runs/a", code = "runs/b"}; a prompt names its tag in `tag_field`."""
    tag_field: Text = "teacher"
    """Field of a prompt's line that holds its tag."""
    use: Literal["advantage", "loss"] = "advantage"
    """Where KL(policy || teacher) goes. `advantage`: each token's advantage gets coeff x (log teacher - log old
    policy). `loss`: the loss gets coeff x KL."""
    estimator: Literal["token", "vocabulary"] = "token"
    """KL at a token. `token`: estimated from the sampled token, in the loss with the gradient of k2. `vocabulary`:
    exact, the sum over all tokens; only in the loss, and the teacher's logprobs of all tokens wait in main memory."""
    coeff: PositiveFloat = 1.0
    """Coefficient of the KL. With rl.advantage.kind="zero" the policy learns from the teacher only."""
    forward_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of `coeff` that goes to the forward KL, KL(teacher || policy) in the loss, over the teacher's `top_k`
    likeliest tokens and a token for all others; the rest goes to the KL above. 0: no forward KL. Only with teachers on
    servers."""
    top_k: PositiveInt = 20
    """Number of the teacher's likeliest tokens in the forward KL; vLLM returns at most its --max-logprobs."""
    self_refresh_rollouts: PositiveInt | None = None
    """Number of rollout batches after which the teacher `self` becomes the current policy; `none`: never."""
    store: Store = "host"
    """Memory in which the teachers' weights wait for their passes. `device`: the policy's. `host`: main memory."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of the teachers on servers. All its ids are compared with the policy's before the run. `none`: each
    server is asked about 256 texts and 256 ids."""
    server: TeacherServerConfig = TeacherServerConfig()

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """All teachers, in the order of their indices: `teacher` first."""
        return (*([] if self.teacher is None else [self.teacher]), *self.teachers.values())

    @cached_property
    def reverse_coeff(self) -> float:
        """Coefficient of KL(policy || teacher)."""
        return self.coeff * (1.0 - self.forward_weight)

    @cached_property
    def served(self) -> Mapping[int, str]:
        """Addresses of the teachers on servers, by index in `paths`."""
        return {index: server_url(path) for index, path in enumerate(self.paths) if path.startswith(HTTP_PARTS)}

    @cached_property
    def served_width(self) -> int:
        """Numbers that a teacher on a server gives of a token: its logprob, and ids and logprobs of the likeliest."""
        return (1 + 2 * self.top_k if self.forward_weight else 1) if self.served else 0

    def index_of(self, tag: object) -> int | None:
        """Return the index in `paths` of the teacher for a prompt with this tag; None if it has no teacher."""
        if isinstance(tag, str) and tag in self.teachers:
            return list(self.teachers).index(tag) + (self.teacher is not None)
        return None if self.teacher is None else 0


class CriticConfig(Section):
    """Critic of rl.advantage.kind="gae": a second model on the policy's mesh that gives each token a single number."""

    load: Text | None = None
    """Checkpoint, folder of checkpoints or run that the critic starts from: a reward model, with its head, or a
    language model, which gets a new head. `none`: the policy's initial weights with a new head."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule, in steps of the critic: rollout batches x their minibatches x `epochs`."""
    epochs: PositiveInt | Literal["auto"] = "auto"
    """Number of times that the critic trains on each completion of a rollout batch; `auto`: rl.update.epochs."""
    warmup_rollouts: NonNegativeInt = 0
    """Number of rollout batches, from the first, in which only the critic is trained, on returns of the unchanged
    policy (VC-PPO, 2503.01491). Their optimizer steps count in train.steps."""
    replay: Literal["none", "r2"] = "none"
    """Routes of the critic's updates. `r2`: those recorded in its pass for values. `none`: its routers choose again."""
    store: Store = "device"
    """Memory in which the critic's weights and optimizer state wait between passes and updates. `device`: the device's.
    `host`: main memory, and gradients take memory only during updates (on CPUs nothing moves)."""
    clip_value: PositiveFloat | None = 0.2
    """Distance from the rollout's value beyond which a value no longer lowers the loss (1707.06347); `none`: no
    limit."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Lambda of the returns that the critic learns; `auto`: rl.advantage.gae_lambda, or 1 if that depends on the length
    (VAPO, 2504.05118)."""


class AdvantageConfig(Section):
    """How a completion's reward is compared with the rest of its group. A group of equal rewards gets zeros."""

    kind: str
    """Advantage, from rewards r. `zscore`: (r - mean) / (std + eps) within the group. `mean`: r - mean.
    `leave_one_out`: r - mean of the group's other rewards (RLOO). `leave_one_out_zscore`: the same, divided by their
    std unless it is 0. `remax`: r - reward of the prompt's greedy completion, which is generated in addition to the
    group (2310.10505). `zero`: none, so that only other terms move the policy, as in distillation. `steps`: each step
    is a z-score among all steps of its prompt's completions, and a token gets the sum over the steps that end there or
    later (2402.03300, process supervision); a plain number is a single step at the end. `gae`: per token, from the
    values of a critic (PPO, 1506.02438). `reinforce_plus_plus`: the discounted sum of the rewards from a token on,
    normalised over the world (2501.03262). `reinforce_plus_plus_baseline`: the same of r - mean. `gdpo`: z-scores of
    each part of the reward in its group, summed with `rl.reward.weights` and normalised over the rollout batch, so that
    no part drowns another (2601.05242). `module:name`: a function of your own (rewards `[prompts, group]`, this
    section, the rewards' unweighted parts `[prompts, group, parts]` -> advantages `[prompts, group]`). `gae`,
    `reinforce_plus_plus`, `remax` and `zero` compare nothing within a group: rl.rollout.group_size may be 1."""

    @cached_property
    def compares_group(self) -> bool:
        """Whether a completion's advantage depends on the rest of its group."""
        return self.kind not in ("gae", "reinforce_plus_plus", "remax", "zero")

    @cached_property
    def is_of_tokens(self) -> bool:
        """Whether each token has its own reward and advantage."""
        return isinstance(self, DiscountedAdvantage)

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded instead of the whole."""
        return self.kind == "steps"

    @cached_property
    def uses_parts(self) -> bool:
        """Whether the parts of a reward are compared, beside or instead of their sum."""
        return self.kind == "gdpo" or isinstance(self, OwnAdvantage)


class PlainAdvantage(AdvantageConfig):
    """Differences of rewards, without options."""

    kind: Literal["mean", "leave_one_out", "remax", "zero"] = "mean"


class DividedAdvantage(AdvantageConfig):
    """Differences of rewards, divided by a standard deviation."""

    ddof: Literal[0, 1] = 1
    """Degrees of freedom of the standard deviation of n rewards (or tokens): 1 divides by n - 1, 0 by n."""
    eps: NonNegativeFloat = 1e-6
    """Number added to the standard deviation, against division by zero."""


class ZscoreAdvantage(DividedAdvantage):
    """Z-scores of rewards, or of the rewards of steps."""

    kind: Literal["zscore", "leave_one_out_zscore", "steps"] = "zscore"


class DecoupledAdvantage(DividedAdvantage):
    """Sums of the z-scores of a reward's parts."""

    kind: Literal["gdpo"] = "gdpo"


class OwnAdvantage(DividedAdvantage):
    """A user-defined function."""

    kind: Extension


class DiscountedAdvantage(DividedAdvantage):
    """Advantages of tokens, from rewards that come later."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token between it and the advantage; 1: no discount."""


class BaselineAdvantage(DiscountedAdvantage):
    """Discounted sums of rewards minus the mean of their prompt, which is no baseline for single steps."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class SteppedAdvantage(DiscountedAdvantage):
    """Advantages of tokens, with rewards at a single token or at several tokens of a completion."""

    rewards_at: Literal["end", "steps"] = "end"
    """Tokens that are rewarded. `end`: the last token, with the reward. `steps`: the last token of each step, with the
    step's value, if a part of the reward returns steps."""

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded instead of the whole."""
        return self.rewards_at == "steps"


class ReturnAdvantage(SteppedAdvantage):
    """Discounted sums of rewards."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class GaeAdvantage(SteppedAdvantage):
    """Generalised advantage estimation, with the values of a critic."""

    kind: Literal["gae"] = "gae"
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length"] = 0.95
    """Weight of later differences of values: 0 trusts the critic alone, 1 the rewards alone. `length`: 1 - 1 /
    (length_alpha x tokens of the completion), at least 0 (VAPO, 2504.05118)."""
    length_alpha: PositiveFloat = 0.05
    """Factor length_alpha of gae_lambda="length"."""
    bootstrap_truncated: bool = False
    """Let a truncated completion, which has no end yet, end in the critic's last value instead of 0."""
    whiten: bool = True
    """Normalise the advantages, (A - mean) / (std + eps), over all trained tokens of the rollout batch."""
    critic: CriticConfig = CriticConfig()


AnyAdvantage = (
    ZscoreAdvantage
    | PlainAdvantage
    | GaeAdvantage
    | ReturnAdvantage
    | BaselineAdvantage
    | DecoupledAdvantage
    | OwnAdvantage
)


Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


class Clip(NamedTuple):
    """Importance ratios are clipped to 1 - low ... 1 + high."""

    low: float
    high: float


class Correction(NamedTuple):
    """Importance-sampling correction of the rollout-training mismatch."""

    kind: Literal["truncate", "mask", "sequence_truncate", "sequence_mask"]
    low: float
    high: float


class LossConfig(Section):
    """The policy's loss and the terms added to it: the fields of every kind."""

    kind: str
    """Loss: grpo (arXiv 2402.03300), ppo (1707.06347: the same per token, with a mean over all tokens), gspo and
    gspo_token (2507.18071), rspo (2510.23027), kimi_k2 (2501.12599, 2507.20534), cispo (2506.13585), dppo_tv
    (2602.04879), sapo (2511.20347). `module:name`: a function of your own (mcore_rl.rl.step.losses.PolicyTokens, this
    section, context-parallel axis -> TokenLoss)."""
    mask_truncated: bool = False
    """Do not train on truncated completions; their rewards still count in their group."""
    kl_coeff: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence to the reference policy (2402.03300: 0.04); 0: no KL and no reference."""
    kl_to: Literal["reference", "old"] = "reference"
    """Policy that the KL compares with. `reference`: the policy as it was at the start, or at the last refresh
    (`reference_refresh_rollouts`). `old`: the policy that sampled the completions, which needs no second set of
    weights; with `kl_estimator="k2"` and twice its tau this is Kimi K2.5's term tau (log r)^2 (2602.02276)."""
    kl_target: PositiveFloat | None = None
    """Target for the KL of a completion to the reference, in nats summed over its tokens. After each rollout batch
    `kl_coeff` is multiplied by e^(clip(KL / kl_target - 1, -0.2, 0.2) x completions / kl_horizon), which for small
    steps is the rule of 1909.08593, where the target is 6. `none`: `kl_coeff` is constant."""
    kl_horizon: PositiveInt = 10000
    """Number of completions over which `kl_coeff` changes by a fifth if the KL is 20 % or more off `kl_target`; at
    least the completions of a rollout batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL, from a token's d = log(reference / policy). `k1`: -d. `k2`: d^2 / 2. `k3`: e^d - d - 1."""
    kl_gradient: Literal["estimator", "k2"] = "estimator"
    """Gradient of the KL in the loss. `estimator`: the estimator's derivative. `k2`: the derivative of k2, whose
    expectation is the gradient of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes. `loss`: into the loss. `reward`: the completion's summed KL, under the old policy, is
    subtracted from its reward; with `gae` and `reinforce_plus_plus...`, each token's KL from the token's reward, as in
    PPO (2203.02155). `mask_truncated` does not spare a completion from it, and a group of equal rewards still gets
    zeros."""
    reference_refresh_rollouts: PositiveInt | None = None
    """Rollout batches after which the reference becomes the current policy (iterative GRPO); `none`: never."""
    reference_store: Store = "host"
    """Memory in which the reference's weights wait for their pass. `device`: the policy's. `host`: main memory."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus: the mean entropy of the next token over the whole vocabulary; 0: no bonus."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens with fp32 logits at a time, unless logits come in chunks (`platform.logits_chunk_tokens`)."""

    @cached_property
    def has_reference(self) -> bool:
        """Whether a reference policy's logprobs are needed."""
        return bool(self.kl_coeff) and self.kl_to == "reference"

    @cached_property
    def has_kl_in_reward(self) -> bool:
        """Whether a KL penalty is subtracted from rewards."""
        return bool(self.kl_coeff) and self.kl_in == "reward"

    @cached_property
    def aggregation_in_use(self) -> Aggregation:
        """Mean over tokens; for sequences' ratios over sequences, where a long one has no more weight."""
        return "seq_mean_token_mean"

    @cached_property
    def norm_tokens(self) -> int | None:
        """Divisor of sums over tokens; None for the maximum number of tokens of a completion."""
        return None

    @cached_property
    def correction(self) -> Correction | None:
        """Correction of the rollout-training mismatch; None without a correction."""
        return None

    @cached_property
    def shift_floor(self) -> float | None:
        """Minimum router-shift ratio with which ratios are multiplied; None if they are not."""
        return None

    @property
    def uses_router_shift(self) -> bool:
        """Whether ratios are multiplied by the router-shift ratio."""
        return self.shift_floor is not None


class Aggregated(LossConfig):
    """A loss of tokens, with a choice of means over them."""

    aggregation: Aggregation = "seq_mean_token_mean"
    """Mean over tokens. `seq_mean_token_mean`: mean over sequences of the mean over their tokens. `token_mean`: mean
    over all tokens, in which long sequences weigh more. `seq_mean_token_sum_norm`: mean over sequences of the sum over
    their tokens, divided by `aggregation_norm_tokens`."""
    aggregation_norm_tokens: PositiveInt | Literal["auto"] = "auto"
    """Divisor of `seq_mean_token_sum_norm` (Dr. GRPO); `auto`: the maximum tokens of a completion
    (rl.rollout.max_new_tokens; max_tokens of rl.environment or rl.agent)."""

    @cached_property
    def aggregation_in_use(self) -> Aggregation:
        """Mean over tokens."""
        return self.aggregation

    @cached_property
    def norm_tokens(self) -> int | None:
        """Divisor of sums over tokens; None for the maximum number of tokens of a completion."""
        return None if self.aggregation_norm_tokens == "auto" else self.aggregation_norm_tokens


class Clipped(LossConfig):
    """A loss with clipped ratios."""

    clip_low: PositiveFloat = 0.2
    """Ratios are clipped from below at 1 - clip_low; the default is the paper's. `dppo_tv`: a token whose advantage is
    negative has no gradient once its probability has fallen by more than this."""
    clip_high: PositiveFloat = 0.2
    """Ratios are clipped from above at 1 + clip_high; the default is the paper's. `dppo_tv`: a token whose advantage is
    positive has no gradient once its probability has risen by more than this."""

    @cached_property
    def clip(self) -> Clip:
        """Both bounds."""
        return Clip(self.clip_low, self.clip_high)


class DualClipped(Clipped):
    """A loss that takes the minimum of a clipped and an unclipped term."""

    dual_clip: PositiveFloat | None = None
    """Maximum ratio where the advantage is negative (1912.09729: 3); `none`: no limit."""


class Corrected(LossConfig):
    """A loss that can have importance-sampling weights."""

    importance_sampling: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    """Correction of the rollout-training mismatch by weights, from w = a token's probability under the old policy /
    under the engine. `none`: no correction. `truncate`: min(w, high). `mask`: w inside low ... high, 0 outside.
    `sequence_truncate`, `sequence_mask`: the same with the geometric mean of w over the completion. Masked tokens still
    count in the mean."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """Lower bound `low` of the masks of `importance_sampling`."""
    importance_sampling_high: PositiveFloat = 2.0
    """Upper bound `high` of `importance_sampling`: the cap of truncation (TIS), or the upper end of the masks."""
    off_policy_mask: PositiveFloat | None = None
    """Maximum mean of log(engine's probability / policy's) over a completion; above it, its tokens with a negative
    advantage have no loss, but still count in the mean (DeepSeek-V3.2's off-policy sequence mask, 2512.02556; slime's
    delta is 1e-4). `none`: no mask."""

    @cached_property
    def correction(self) -> Correction | None:
        """Correction of the rollout-training mismatch; None without a correction."""
        if self.importance_sampling == "none":
            return None
        return Correction(self.importance_sampling, self.importance_sampling_low, self.importance_sampling_high)


class Shifted(LossConfig):
    """A loss in which ratios can be multiplied by the router-shift ratio."""

    router_shift: bool = False
    """Multiply each token's ratio, before any clip or mean, by the router-shift ratio: near 1 if the routers' scores of
    the old policy's experts have changed little since the pass for old logprobs, and smaller otherwise (RSPO)."""
    router_shift_floor: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Minimum router-shift ratio of `router_shift`."""

    @cached_property
    def shift_floor(self) -> float | None:
        """Minimum router-shift ratio with which ratios are multiplied; None if they are not."""
        return self.router_shift_floor if self.router_shift else None


class GrpoLoss(Shifted, Corrected, Aggregated, DualClipped):
    """Clipped ratios of tokens."""

    kind: Literal["grpo"] = "grpo"


class PpoLoss(Shifted, Corrected, Aggregated, DualClipped):
    """Clipped ratios of tokens, with a mean over all tokens."""

    kind: Literal["ppo"] = "ppo"
    aggregation: Aggregation = "token_mean"


class GspoTokenLoss(Shifted, Corrected, DualClipped):
    """Clipped ratios of sequences, with an advantage for each token."""

    kind: Literal["gspo_token"] = "gspo_token"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class GspoLoss(Shifted, Corrected, DualClipped):
    """Clipped ratios of sequences."""

    kind: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4
    importance_sampling: Literal["none", "sequence_truncate", "sequence_mask"] = "none"


class RspoLoss(Shifted, Corrected, Clipped):
    """Geometric means of clipped ratios, as in GMPO (2507.20673), times the router-shift ratio."""

    kind: Literal["rspo"] = "rspo"
    clip_low: PositiveFloat = 1 - exp(-0.4)
    clip_high: PositiveFloat = exp(0.4) - 1
    importance_sampling: Literal["none", "sequence_truncate", "sequence_mask"] = "none"
    router_shift: bool = True


class KimiK2Loss(LossConfig):
    """A regression that is valid under any sampler, so that nothing is clipped or weighted."""

    kind: Literal["kimi_k2"] = "kimi_k2"
    tau: PositiveFloat = 0.01
    """Weight of the regularisation towards the old policy, in units of the reward."""


class CispoLoss(Corrected, Aggregated, Clipped):
    """Weighted logprobs, with a mean over all tokens."""

    kind: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0  # no lower bound, as in the paper, which gives no number for the upper
    clip_high: PositiveFloat = 0.28
    aggregation: Aggregation = "token_mean"


class DppoTvLoss(Corrected, Aggregated, Clipped):
    """Ratios of tokens without a clip, where the change of a probability decides instead (binary total variation)."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    ratio_limit: PositiveFloat = 20.0
    """Maximum ratio: a token with a larger ratio has this weight in the gradient."""


class SapoLoss(Corrected, Aggregated):
    """Soft gates on ratios of tokens in place of clips."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages: the larger, the sooner a ratio away from 1 loses weight."""
    tau_negative: PositiveFloat = 1.05
    """Temperature of the gate for all other advantages."""


class OwnLoss(Shifted, Corrected, Aggregated, DualClipped):
    """A user-defined function, which may read any field except `tau`."""

    kind: Extension


AnyLoss = (
    GrpoLoss | PpoLoss | GspoLoss | GspoTokenLoss | RspoLoss | KimiK2Loss | CispoLoss | DppoTvLoss | SapoLoss | OwnLoss
)
