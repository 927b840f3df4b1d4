"""Reinforcement learning: how completions are sampled, judged, compared, and learned from."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Probability, Section

LossKind = Literal["grpo", "gspo", "gspo_token", "kimi_k2", "cispo"]
Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


class PromptConfig(Section):
    """Where prompts and their answers come from."""

    task: Literal["file", "arithmetic", "sorting", "copying", "reversing", "countdown"] | Extension = "file"
    """`file`: read `files`; the others make problems without end, each from the seed and its index alone; `module:name`
    does so with a function of your own (random generator, size -> rl.tasks.TaskProblem)."""
    files: tuple[str, ...] = ()
    """JSON lines with a prompt and an answer; all other fields of a line reach the reward functions."""
    prompt_field: str = "prompt"
    """The field with the prompt: text, or a list of {"role", "content"}."""
    answer_field: str = "answer"
    """The field with the reference answer; a line may lack it when no reward needs it."""
    smallest: PositiveInt = 2
    """Of a built-in task: fewest digits, letters or numbers of a problem."""
    largest: PositiveInt = 4
    """Of a built-in task: most digits, letters or numbers of a problem."""
    max_tokens: PositiveInt = 1024
    """Prompts of files that are longer are left out and counted; one of a built-in task ends the run."""


class RolloutConfig(Section):
    """What is sampled for one step."""

    prompts_per_step: PositiveInt = 16
    """Prompts of one rollout batch, over all ranks."""
    group_size: PositiveInt = 8
    """Completions per prompt; advantages are relative within them."""
    max_new_tokens: PositiveInt = 1024
    """Per completion; one that reaches it without an end is truncated."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0: the likeliest token. Training uses the tempered distribution too."""
    top_k: NonNegativeInt = 0
    """Sample among the so many likeliest tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that together have this probability; 1: all."""
    min_p: Probability = 0.0
    """Sample among tokens at least so many times as likely as the likeliest; 0: all."""
    stop_strings: tuple[str, ...] = ()
    """A completion ends after any of these; so it does after the end-of-text token."""
    stop_tokens: tuple[NonNegativeInt, ...] = ()
    """Further token ids that end a completion."""
    dynamic_sampling: bool = False
    """Groups whose completions are all rewarded alike are replaced by those of new prompts (DAPO)."""
    max_refills: PositiveInt = 4
    """For `dynamic_sampling`: rollouts of one step after the first; then it trains on the groups it has."""


class EngineConfig(Section):
    """How completions are computed; it changes speed and memory, not what comes out."""

    kind: Literal["native"] | Extension = "native"
    """Which engine: `native` is the modules that train; `module:name`: a function of your own with the arguments of
    rl.engines.make.native_engine."""
    slots: PositiveInt = 64
    """Completions in progress at a time on each replica of the model; each holds keys and values of the longest."""
    step_tokens: PositiveInt = 2048
    """Tokens of one step at the most: one of each completion in progress, and parts of prompts."""


class RewardConfig(Section):
    """How a completion is judged: a weighted sum of named parts, each between its own bounds."""

    parts: tuple[str | Extension, ...] = ("exact",)
    """Of `exact`, `positions`, `numeric`, `math`, `countdown`, `format`, `regex`, `length`, or your own function as
    `module:function`. The first one tells whether a completion is right (1 or more)."""
    weights: tuple[float, ...] = ()
    """One a part; empty: 1 each."""
    answer_pattern: str = ""
    """Regular expression: the last match's first group is what a completion answers; empty: all of its text."""
    format_pattern: str = ""
    """For `format`: 1 when the whole completion matches."""
    regex_pattern: str = ""
    """For `regex`: 1 when a match is found anywhere."""
    length_min_tokens: NonNegativeInt = 0
    """For `length`: a shorter completion loses the missing share, from 0 to -1."""
    length_max_tokens: NonNegativeInt = 0
    """For `length`: a longer one loses the share in excess, at most 1; 0: no upper limit."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Before rollout.max_new_tokens: here the reward falls linearly to `-overlong_penalty` (DAPO); 0: not."""
    overlong_penalty: PositiveFloat = 1.0
    """Taken from a completion of rollout.max_new_tokens tokens, with `overlong_buffer_tokens`."""
    timeout_s: PositiveFloat = 10.0
    """A part that takes longer on one completion is an error there: counted, worth `error_value`."""
    error_value: float = 0.0
    """What a part is worth that raised, returned no finite number, or took too long."""
    workers: PositiveInt = 1
    """Processes of each replica that judge."""


class AdvantageConfig(Section):
    """What a completion's reward means beside the others of its prompt. A group of equal rewards gets zeros."""

    kind: Literal["zscore", "mean", "leave_one_out", "leave_one_out_zscore", "steps"] | Extension = "zscore"
    """`zscore`: (r - mean) / (std + eps); `mean`: r - mean; `leave_one_out`: r - mean of the others (RLOO);
    `leave_one_out_zscore`: that, over the others' std where it is not 0; `steps`: a token gets the sum of the z-scores,
    among all steps of its prompt's completions, of the steps that end there or later (2402.03300, process supervision);
    a reward that is a plain number is one step at the end; `module:name`: a function of your own (rewards `[prompts,
    group]`, this section -> advantages of the same shape)."""
    ddof: Literal[0, 1] = 1
    """Of the standard deviation: 1 divides by group_size - 1, 0 by group_size."""
    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""


class Clip(NamedTuple):
    """Importance ratios are clipped to 1 - low ... 1 + high."""

    low: float
    high: float


PAPER_CLIPS: dict[str, Clip] = {
    "grpo": Clip(0.2, 0.2),
    "gspo": Clip(3e-4, 4e-4),
    "gspo_token": Clip(3e-4, 4e-4),
    "kimi_k2": Clip(0.0, 0.0),  # clips nothing
    "cispo": Clip(1.0, 0.28),  # no lower bound, as in the paper; for the upper it gives no number
}
PAPER_AGGREGATIONS: dict[str, Aggregation] = {"cispo": "token_mean"}
PAPER_TAU = 0.01


class LossConfig(Section):
    """The objective of the policy, and what is added to it."""

    kind: LossKind | Extension = "grpo"
    """grpo (arXiv 2402.03300), gspo and gspo_token (2507.18071), kimi_k2 (2501.12599, 2507.20534),
    cispo (2506.13585); `module:name`: a function of your own (rl.objectives.policy_tokens.PolicyTokens, this section,
    context-parallel axis -> TokenLoss)."""
    clip_low: NonNegativeFloat = 0.0
    """Ratios are clipped from below at 1 - this; 0: the paper's (grpo 0.2, gspo 3e-4, cispo 1)."""
    clip_high: NonNegativeFloat = 0.0
    """Ratios are clipped from above at 1 + this; 0: the paper's (grpo 0.2, gspo 4e-4, cispo 0.28)."""
    dual_clip: NonNegativeFloat = 0.0
    """Ratios of bad completions (negative advantage) count at most so much (1912.09729: 3); 0: no limit."""
    tau: NonNegativeFloat = 0.0
    """For kimi_k2: how strongly the policy is held to the old one; 0: 0.01."""
    aggregation: Literal["auto", "seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = "auto"
    """How tokens make one number: mean over sequences of their tokens' means; mean over all tokens; mean over
    sequences of their tokens' sums over `aggregation_norm_tokens`; `paper`: as that of `kind` has it."""
    aggregation_norm_tokens: NonNegativeInt = 0
    """For `seq_mean_token_sum_norm` (Dr. GRPO); 0: rollout.max_new_tokens."""
    mask_truncated: bool = False
    """Truncated completions are not trained on; their rewards still count in their group."""
    kl_coeff: NonNegativeFloat = 0.0
    """Of the KL divergence to the reference policy (2402.03300: 0.04); 0: there is no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(reference / policy) of a sampled token: -d, d^2 / 2, or e^d - d - 1."""
    kl_gradient: Literal["estimator", "k2"] = "estimator"
    """Of the estimator, in the loss: its own derivative, or that of k2, which is the KL's in expectation."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss, or its sum over a completion, under the old policy, taken from the reward."""
    reference_refresh_rollouts: NonNegativeInt = 0
    """Every so many rollout batches the reference becomes the policy (iterative GRPO); 0: never."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Of the mean entropy of the next token over the whole vocabulary, which is raised."""
    importance_sampling: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    """Correction for an engine whose logprobs are not the trainer's, by w = old / engine's probability of a
    token, or its geometric mean over the completion: weigh by min(w, high), or by w inside low ... high and
    by 0 outside. What is masked still counts in the mean."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """For the masks of `importance_sampling`."""
    importance_sampling_high: PositiveFloat = 2.0
    """For `importance_sampling`: the cap of truncated importance sampling (TIS), or the upper end of a mask."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in fp32 at a time."""

    @property
    def clip(self) -> Clip:
        """Bounds in use; a loss of the user's own has those of grpo."""
        paper = PAPER_CLIPS.get(self.kind, PAPER_CLIPS["grpo"])
        return Clip(self.clip_low or paper.low, self.clip_high or paper.high)

    @property
    def tau_in_use(self) -> float:
        """`tau`, or the default."""
        return self.tau or PAPER_TAU

    @property
    def aggregation_in_use(self) -> Aggregation:
        """`aggregation`, or that of the paper of `kind`."""
        if self.aggregation == "auto":
            return PAPER_AGGREGATIONS.get(self.kind, "seq_mean_token_mean")
        return self.aggregation


class UpdateConfig(Section):
    """How a rollout batch becomes updates of train.global_batch completions each."""

    epochs: PositiveInt = 1
    """Times that each completion of a rollout batch is trained on."""
    max_tokens_per_microbatch: NonNegativeInt = 0
    """Tokens of one forward pass on one replica, into which whole completions are packed; 0: one of the longest."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Whose logprobs are the old policy's: of the training pass under the weights of the rollout, or as sampled,
    which saves that pass and leaves the engine's rounding in the ratio."""


class EvalConfig(Section):
    """Prompts that are never trained on, and how they are answered; train.eval_interval says when."""

    files: tuple[str, ...] = ()
    """As rl.prompts.files; with a built-in task they stay empty, and problems of another seed are made."""
    num_prompts: PositiveInt = 64
    """The first so many."""
    samples: PositiveInt = 1
    """Completions a prompt: with k of them pass@k is told too."""
    temperature: NonNegativeFloat = 0.0
    """Of these completions; 0: the likeliest tokens."""


class SamplesConfig(Section):
    """Completions that people read: all of a rollout batch as JSON lines in `<run_dir>/samples`, some in the log."""

    interval: NonNegativeInt = 10
    """Rollout batches between two that are written; 0: none."""
    shown: NonNegativeInt = 3
    """Of those, how many stand in the log as a table."""


class RlConfig(Section):
    """One RL step: prompts, rollouts, rewards, advantages, loss."""

    prompts: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv 2503.20783: neither a response's length nor a group's spread divides anything.
    "dr_grpo": {
        "loss": {"kind": "grpo", "aggregation": "seq_mean_token_sum_norm"},
        "advantage": {"kind": "mean"},
    },
    # arXiv 2503.14476: higher upper clip, tokens all alike, no KL, groups with signal only, soft length limit.
    "dapo": {
        "loss": {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
        "rollout": {"dynamic_sampling": True, "max_new_tokens": 20480},
        "reward": {"overlong_buffer_tokens": 4096},
    },
}
"""Named sets of fields over GRPO; they can be written into a config file as they stand, under `rl`."""


def preset(name: str) -> RlConfig:
    """The defaults with the fields of `PRESETS[name]`."""
    return RlConfig.model_validate(PRESETS[name])
