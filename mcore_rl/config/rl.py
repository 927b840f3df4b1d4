"""The section `rl`: how completions are sampled, scored, compared, and learned from."""

from math import exp
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.critic import CriticConfig
from mcore_rl.config.distill import DistillConfig
from mcore_rl.config.extension import MODEL_PART, Extension, correct_part
from mcore_rl.config.ptx import PtxConfig
from mcore_rl.config.section import Probability, Seconds, Section, Text

LossKind = Literal["grpo", "ppo", "gspo", "gspo_token", "rspo", "kimi_k2", "cispo"]
Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


class PromptConfig(Section):
    """Prompts and their reference answers."""

    task: (
        Literal["file", "arithmetic", "sorting", "copying", "reversing", "countdown", "seeds"] | Extension
    ) = "file"
    """Source of prompts; `file`: read `files`; the others make problems without end, each from the seed and its index
    alone; `seeds`: numbers, from which rl.environment makes problems of its own; `module:name` does so with a function
    of your own (random generator, size -> rl.tasks.TaskProblem)."""
    files: tuple[str, ...] = ()
    """JSON lines (also .gz), .parquet, or datasets of the Hugging Face hub as hub:NAME#CONFIG:SPLIT, with a prompt and
    an answer; all other fields of a line reach the reward functions."""
    file_weights: tuple[float, ...] = ()
    """Weight of each of `files` in the mixture, in prompts: with [3, 1] three of four are from the first, and each file
    begins anew, in another order, when it has been read; an empty list: every prompt once an epoch."""
    prompt_field: str = "prompt"
    """The field with the prompt: text, or a list of {"role", "content"}."""
    prompt_template: Text | None = None
    """Text of the prompt in which {name} is a field of the line ({{name}} is the text {name}), as "{question} Put the
    answer in \\boxed{}."; `none`: the prompt is `prompt_field`."""
    answer_field: str = "answer"
    """The field with the reference answer; a line may lack it when no reward needs it."""
    max_bad: NonNegativeInt | None = 0
    """Lines of files that may be no prompt: they are left out, counted, and logged with file and line; more end the run
    before it starts; `none`: any number. Training and evaluation count apart."""
    smallest: PositiveInt = 2
    """Fewest digits, letters or numbers of a problem of a built-in task."""
    largest: PositiveInt = 4
    """Most digits, letters or numbers of a problem of a built-in task."""
    max_tokens: PositiveInt = 1024
    """Longest prompt in tokens; longer ones of files are left out and counted, one of a built-in task ends the run."""


class RolloutConfig(Section):
    """Number of completions that are sampled for one step, and how."""

    prompts_per_step: PositiveInt = 16
    """Prompts of one rollout batch, over all ranks."""
    group_size: PositiveInt = 8
    """Completions per prompt; advantages are relative within them."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of a completion; one that reaches it without an end is truncated."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; at 0 the likeliest token is taken. Training uses the tempered distribution too."""
    top_k: PositiveInt | None = None
    """Number of likeliest tokens to sample among; `none`: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability of the likeliest tokens to sample among, together; 1 is all tokens."""
    min_p: Probability = 0.0
    """Least probability of a token to sample among, as a fraction of the likeliest token's; 0 is all tokens."""
    stop_strings: tuple[str, ...] = ()
    """Texts after which a completion ends, as it does after the model's end tokens."""
    stop_tokens: tuple[NonNegativeInt, ...] = ()
    """Further token ids that end a completion, beside the end of the assistant's turn in the chat template, the
    tokenizer's eos_token, eos_token_id in the generation_config.json beside it, and the end of a document."""
    dynamic_sampling: bool = False
    """Replace groups whose completions all have the same reward by those of new prompts (DAPO)."""
    max_refills: PositiveInt = 4
    """Further rollouts of one step with `dynamic_sampling`; after them it trains on the groups it has."""


class EngineConfig(Section):
    """Computation of completions, in this process or by inference servers: it changes speed and memory, not what is
    sampled from.
    """

    kind: Literal["native", "vllm", "sglang"] | Extension = "native"
    """Engine; `native`: the modules that train; `vllm` and `sglang`: servers, started by the run (`count`) or before it
    (`urls`), which get the new weights after every rollout batch; `module:name`: a function of your own with the
    arguments of rl.engines.make.native_engine."""
    slots: PositiveInt = 64
    """Completions in progress at a time on each replica of the model, with `native`; each holds keys and values of the
    longest."""
    step_tokens: PositiveInt = 2048
    """Most tokens of one step, with `native`: one of each completion in progress, and parts of prompts."""
    count: NonNegativeInt = 0
    """Servers that the run starts on the machine of its first rank, and ends with itself."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, as http://node7:8000, instead of `count`."""
    command: tuple[str, ...] = ()
    """Program that starts a server, and its first arguments, as ["venv-vllm/bin/python", "-m",
    "vllm.entrypoints.openai.api_server"]; an empty list: the module of vLLM or SGLang in the Python of this run."""
    args: tuple[str, ...] = ()
    """Further arguments of each server that is started, as ["--gpu-memory-utilization", "0.8"]."""
    devices: tuple[NonNegativeInt, ...] = ()
    """GPUs of the servers that are started, `tensor_parallel` for each in order; an empty list: those that the run
    sees."""
    tensor_parallel: PositiveInt = 1
    """GPUs of each server that is started."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the servers' weights; `auto`: that of platform.precision."""
    max_model_len: PositiveInt | Literal["auto"] = "auto"
    """Largest number of tokens of prompt and completion together that a server holds; `auto`: that of the longest
    sample."""
    requests: PositiveInt = 256
    """Completions in progress at a time that each replica of the trained model asks servers for."""
    attempts: PositiveInt = 3
    """Number of times that a completion is asked for, each time of another server while there is one."""
    min_servers: PositiveInt = 1
    """Fewest servers with the present weights; with fewer the run ends."""
    start_timeout_s: Seconds = 900.0
    """Seconds until a server that was started, or that `urls` names, has to answer."""
    request_timeout_s: Seconds = 1800.0
    """Seconds that a server may take for a completion."""
    update_timeout_s: Seconds = 600.0
    """Seconds that a server may take for each call of an update of weights."""
    transport: Literal["files", "nccl"] = "files"
    """Path of new weights to the servers: files in `transport_dir`, or a broadcast between GPUs."""
    transport_dir: Text | None = None
    """Folder of weights on their way to the servers, which trainer and servers see; `none`: /dev/shm, which is one
    machine's memory."""
    probe_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Limit in nats of the difference between a server's and the trainer's logprobs of fixed texts after an update: of
    the largest where both compute in fp32, else of the mean; `auto`: 2e-4, or 0.1."""
    api_key_env: Text | None = None
    """Name of the environment variable with the key that servers ask for (--api-key); `none`: they ask for none."""
    ca_file: Text | None = None
    """File of the certificates by which https servers of `urls` are known; `none`: those of the system."""

    @property
    def is_served(self) -> bool:
        """Whether inference servers make the completions."""
        return self.kind in ("vllm", "sglang")


class CodeConfig(Section):
    """The part `code`: the program in a completion is run against the tests of its prompt, in a sandbox."""

    sandbox: Literal["auto", "bubblewrap", "nsjail"] = "auto"
    """Program that keeps the completion's from files, network and other processes; `auto`: the first one that is
    installed. Without one the run is refused."""
    python: Text | None = None
    """Interpreter of the programs, with its packages, such as the one of a virtual environment; `none`: the one that
    runs here, without packages."""
    tests_field: Text = "tests"
    """Field of a prompt with its tests; a list of {"input", "output"}: the program reads the one and must write the
    other; {"inputs": [...], "outputs": [...]}: the same in two lists; a text or a list of texts: Python, such as
    asserts, that runs after the program. A text may also be the JSON of these."""
    timeout_s: Seconds = 8.0
    """Seconds that all tests of a completion may take together; those that have not passed by then have failed."""
    memory_mib: PositiveInt = 512
    """MiB of address space of the program, and of the files that it may write."""
    partial: bool = False
    """Give the fraction of the tests that pass; otherwise 1 where all do, else 0."""


class EnvironmentConfig(Section):
    """An environment that answers the policy, so that a completion has several turns; it runs in its own processes."""

    name: Literal["calculator", "guessing", "python", "reasoning_gym", "textarena"] | Extension | None = None
    """Environment; `calculator`: a tool that computes; `guessing`: a game of guessing a number; `python`: a tool that
    runs Python in a sandbox (bubblewrap or nsjail); `reasoning_gym`: a dataset of reasoning-gym, in one turn;
    `textarena`: a game of TextArena for one player; `module:name`: a class of your own
    (rl.environments.interface.Environment); `none`: a completion is one turn."""
    arguments: dict[str, str | bool | int | float] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Arguments with which the class is made, as dataset = "chain_sum" for `reasoning_gym`."""
    max_turns: PositiveInt = 8
    """Most turns of the policy; a conversation that reaches it is truncated."""
    max_tokens: PositiveInt = 4096
    """Most tokens of a conversation after its prompt, those of the environment too; a turn that may not have room for
    rl.rollout.max_new_tokens does not begin, and the conversation is truncated."""
    timeout_s: Seconds = 10.0
    """Seconds that the environment may take for one answer; beyond them it has failed."""
    max_memory_gib: PositiveFloat | None = None
    """GiB of address space that a process of the environment, and each that it starts, may take beyond what it begins
    with (RLIMIT_AS); `none`: no limit."""
    workers: PositiveInt = 1
    """Processes of each replica that run the environment."""


ENVIRONMENT_PART = "environment"
"""Part of `rl.reward.parts` that is the sum of the rewards that the environment gave."""


class RewardConfig(Section):
    """Reward of a completion: a weighted sum of named parts, each between its own bounds."""

    parts: tuple[str | Extension, ...] = ("exact",)
    """Parts of the reward: `exact`, `positions`, `numeric`, `math`, `countdown`, `code`, `format`, `regex`, `length`,
    `environment` (the sum of the rewards of rl.environment; the other parts then score the last turn), your own
    function as `module:function`, or a reward model as `model:PATH`, a checkpoint or run of `mcore-rl rm` with the
    policy's tokenizer, which scores prompt and completion at the last token."""
    weights: tuple[float, ...] = ()
    """Weight of each part; an empty list: 1 each."""
    correct: Text | None = "auto"
    """Part that decides which completions are correct: those to which it gives 1 or more. Its weight may be 0; `auto`:
    the first part that is a rule or a function; `none`: no part decides, and no accuracy is reported."""
    code: CodeConfig = CodeConfig()
    answer_pattern: Text | None = None
    """Regular expression whose last match's first group is the answer of a completion; `none`: all of its text."""
    format_pattern: Text | None = None
    """Regular expression of the part `format`, which is 1 when the whole completion matches."""
    regex_pattern: Text | None = None
    """Regular expression of the part `regex`, which is 1 when it matches anywhere."""
    length_min_tokens: NonNegativeInt = 0
    """Least length for the part `length`: a shorter completion loses the missing share, from 0 to -1."""
    length_max_tokens: PositiveInt | None = None
    """Largest length for the part `length`: a longer completion loses the share in excess, at most 1; `none`: no
    limit."""
    overlong_buffer_tokens: PositiveInt | None = None
    """Tokens before rollout.max_new_tokens, or with an environment before environment.max_tokens, over which the reward
    falls linearly by `overlong_penalty` (DAPO); `none`: it does not fall."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward taken from a completion of rollout.max_new_tokens tokens, with `overlong_buffer_tokens`."""
    timeout_s: Seconds = 10.0
    """Seconds that a part may take on one completion; beyond them its score has failed."""
    error_value: float | None = None
    """Value of a part whose score failed: it raised, returned no finite number, took too long, or its process died;
    `none`: the completion has no reward, and leaves the statistics of its group and the loss."""
    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Largest fraction of a part's scores in one rollout batch that may fail; above it the run ends; 1: it goes on
    whatever fails."""
    max_memory_gib: PositiveFloat | None = None
    """GiB of address space that a process which computes rewards, and each that it starts, may take beyond what it
    begins with (RLIMIT_AS); a function that needs more gets a MemoryError; `none`: no limit."""
    workers: PositiveInt = 1
    """Processes of each replica that compute rewards."""
    model_store: Literal["device", "host"] = "host"
    """Memory in which the weights of reward models wait for their passes: beside the policy, or main memory."""
    normalize_models: bool = False
    """Subtract from the scores of reward models the mean of all their scores so far in the run, and divide by their
    standard deviation; both are saved with each checkpoint."""

    @property
    def model_parts(self) -> tuple[str, ...]:
        """Parts that are reward models."""
        return tuple(part for part in self.parts if part.startswith(MODEL_PART))

    @property
    def correct_part(self) -> str | None:
        """Part that decides which completions are correct; None: none does."""
        return correct_part(self.correct, self.parts)

    @property
    def environment_weight(self) -> float:
        """Weight of the part `environment`; 0 without it."""
        weights = self.weights or (1.0,) * len(self.parts)
        return dict(zip(self.parts, weights, strict=True)).get(ENVIRONMENT_PART, 0.0)

    @property
    def of_functions(self) -> "RewardConfig | None":
        """The parts that are functions, not models or the environment, with their weights; None: there are none."""
        weights = self.weights or (1.0,) * len(self.parts)
        rest = [
            (part, weight)
            for part, weight in zip(self.parts, weights, strict=True)
            if part not in self.model_parts and part != ENVIRONMENT_PART
        ]
        if not rest:
            return None
        parts, weights = zip(*rest, strict=True)
        correct = self.correct_part if self.correct_part in parts else None
        return self.model_copy(update={"parts": parts, "weights": weights, "correct": correct})


class AdvantageConfig(Section):
    """Comparison of a completion's reward with the others of its prompt. A group of equal rewards gets zeros."""

    kind: (
        Literal[
            "zscore",
            "mean",
            "leave_one_out",
            "leave_one_out_zscore",
            "remax",
            "zero",
            "steps",
            "gae",
            "reinforce_plus_plus",
        ]
        | Extension
    ) = "zscore"
    """Advantage; `zscore`: (r - mean) / (std + eps); `mean`: r - mean; `leave_one_out`: r - mean of the others (RLOO);
    `leave_one_out_zscore`: that, over the others' std where it is not 0; `remax`: r - reward of the prompt's greedy
    completion, which is generated beside the group (2310.10505); `zero`: none, so that other terms alone move the
    policy, as in distillation; `steps`: a token gets the sum of the z-scores,
    among all steps of its prompt's completions, of the steps that end there or later (2402.03300, process supervision);
    a reward that is a plain number is one step at the end; `gae`: of each token, by the values of a critic (PPO,
    1506.02438); `reinforce_plus_plus`: the discounted sum of a token's and later rewards, normalised over the world
    (2501.03262); `module:name`: a function of your own (rewards `[prompts, group]`, this section -> advantages of the
    same shape). `gae`, `reinforce_plus_plus`, `remax` and `zero` compare nothing within a group: rl.rollout.group_size
    may be 1."""
    ddof: Literal[0, 1] = 1
    """Degrees of freedom of the standard deviation: 1 divides by group_size - 1 (by tokens - 1 where tokens are
    normalised), 0 by group_size."""
    eps: NonNegativeFloat = 1e-6
    """Number added to the standard deviation."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token that it comes later, with `gae` and `reinforce_plus_plus`."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length"] = 0.95
    """Weight of later differences of values in `gae`: 0 trusts the critic, 1 the rewards alone; `length`:
    1 - 1 / (length_alpha x tokens of the completion), at least 0 (VAPO, 2504.05118)."""
    length_alpha: PositiveFloat = 0.05
    """Factor of gae_lambda="length"."""
    rewards_at: Literal["end", "steps"] = "end"
    """Tokens that are rewarded, with `gae` and `reinforce_plus_plus`: the last one by the reward, or the last one of
    each step by the step's value, where a part of the reward returns steps."""
    bootstrap_truncated: bool = False
    """In `gae`, a truncated completion ends in the critic's last value of it, not in 0: it has no end yet."""
    whiten: bool = True
    """Normalise the advantages of `gae`, (A - mean) / (std + eps), over all trained tokens of the rollout batch."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether each token has its own reward and advantage, and groups compare nothing."""
        return self.kind in ("gae", "reinforce_plus_plus")

    @property
    def compares_group(self) -> bool:
        """Whether a completion's advantage depends on the others of its prompt."""
        return not self.is_of_tokens and self.kind not in ("remax", "zero")

    @property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded, and not the whole."""
        return self.kind == "steps" or (self.is_of_tokens and self.rewards_at == "steps")


class Clip(NamedTuple):
    """Importance ratios are clipped to 1 - low ... 1 + high."""

    low: float
    high: float


PAPER_CLIPS: dict[str, Clip] = {
    "grpo": Clip(0.2, 0.2),
    "ppo": Clip(0.2, 0.2),
    "gspo": Clip(3e-4, 4e-4),
    "gspo_token": Clip(3e-4, 4e-4),
    "rspo": Clip(1 - exp(-0.4), exp(0.4) - 1),  # of GMPO (2507.20673), which it rescales
    "kimi_k2": Clip(0.0, 0.0),  # clips nothing
    "cispo": Clip(1.0, 0.28),  # no lower bound, as in the paper; for the upper it gives no number
}
PAPER_AGGREGATIONS: dict[str, Aggregation] = {"cispo": "token_mean", "ppo": "token_mean"}
PAPER_TAU = 0.01


class LossConfig(Section):
    """The policy's loss, and the terms added to it."""

    kind: LossKind | Extension = "grpo"
    """Loss; grpo (arXiv 2402.03300), ppo (1707.06347: the same for a token, and a mean over all tokens), gspo and
    gspo_token (2507.18071), rspo (2510.23027), kimi_k2 (2501.12599, 2507.20534), cispo (2506.13585); `module:name`: a
    function of yours (rl.objectives.policy_tokens.PolicyTokens, this section, context-parallel axis -> TokenLoss)."""
    clip_low: PositiveFloat | Literal["auto"] = "auto"
    """Ratios are clipped from below at 1 - clip_low; `auto`: the paper's (grpo and ppo 0.2, gspo 3e-4, rspo
    1 - e^-0.4, cispo 1)."""
    clip_high: PositiveFloat | Literal["auto"] = "auto"
    """Ratios are clipped from above at 1 + clip_high; `auto`: the paper's (grpo and ppo 0.2, gspo 4e-4, rspo
    e^0.4 - 1, cispo 0.28)."""
    dual_clip: PositiveFloat | None = None
    """Largest ratio of completions with a negative advantage (1912.09729: 3); `none`: no limit."""
    router_shift: bool | Literal["auto"] = "auto"
    """Multiply the ratio of each token, before any clip or mean, by how little the routers' scores of the old policy's
    experts have changed since its pass for old logprobs (RSPO); `auto`: with kind="rspo" alone."""
    router_shift_floor: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Least factor of `router_shift`."""
    tau: PositiveFloat | Literal["auto"] = "auto"
    """Weight with which kimi_k2 regularises the policy towards the old one; `auto`: 0.01."""
    aggregation: Literal["auto", "seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = "auto"
    """Mean over tokens: mean over sequences of their tokens' means; mean over all tokens; mean over sequences of their
    tokens' sums over `aggregation_norm_tokens`; `auto`: as in the paper of `kind`."""
    aggregation_norm_tokens: PositiveInt | Literal["auto"] = "auto"
    """Divisor of `seq_mean_token_sum_norm` (Dr. GRPO); `auto`: rollout.max_new_tokens, with an environment
    environment.max_tokens."""
    mask_truncated: bool = False
    """Do not train on truncated completions; their rewards still count in their group."""
    kl_coeff: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence to the reference policy (2402.03300: 0.04); at 0 there is no reference."""
    kl_target: PositiveFloat | None = None
    """KL of a completion to the reference, in nats summed over its tokens, towards which `kl_coeff` is changed after
    each rollout batch: times 1 + clip(KL / kl_target - 1, -0.2, 0.2) x completions / kl_horizon (1909.08593, which has
    6); `none`: it stays as it is."""
    kl_horizon: PositiveInt = 10000
    """Completions over which a KL that is 20 % or more off `kl_target` changes `kl_coeff` by a fifth."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL: with d = log(reference / policy) of a sampled token, -d, d^2 / 2, or e^d - d - 1."""
    kl_gradient: Literal["estimator", "k2"] = "estimator"
    """Gradient of the KL in the loss: the estimator's derivative, or that of k2, which is the KL's in expectation."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL: added to the loss, or its sum over a completion, under the old policy, taken from the reward. In
    the reward a completion that `mask_truncated` masks pays too, and a group of equal rewards still gets zeros. With
    `gae` and `reinforce_plus_plus` it is taken from the reward of each token, as in PPO (2203.02155)."""
    reference_refresh_rollouts: PositiveInt | None = None
    """Rollout batches after which the reference becomes the policy (iterative GRPO); `none`: never."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the mean entropy of the next token over the whole vocabulary, which is raised."""
    importance_sampling: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    """Importance-sampling correction of the rollout-training mismatch, by w = old / engine's probability of a token, or
    its geometric mean over the completion: weigh by min(w, high), or by w inside low ... high and by 0 outside. Masked
    tokens still count in the mean."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """Lower end of the masks of `importance_sampling`."""
    importance_sampling_high: PositiveFloat = 2.0
    """Cap of truncated importance sampling (TIS), or the upper end of the masks of `importance_sampling`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in fp32 at a time."""

    @property
    def clip(self) -> Clip:
        """Bounds in use; a loss of the user's own has those of grpo."""
        paper = PAPER_CLIPS.get(self.kind, PAPER_CLIPS["grpo"])
        return Clip(
            paper.low if self.clip_low == "auto" else self.clip_low,
            paper.high if self.clip_high == "auto" else self.clip_high,
        )

    @property
    def uses_router_shift(self) -> bool:
        """Whether ratios are multiplied by the router-shift ratio."""
        return self.kind == "rspo" if self.router_shift == "auto" else self.router_shift

    @property
    def tau_in_use(self) -> float:
        """Number that `tau` stands for."""
        return PAPER_TAU if self.tau == "auto" else self.tau

    @property
    def aggregation_in_use(self) -> Aggregation:
        """Aggregation that `aggregation` stands for."""
        if self.aggregation == "auto":
            return PAPER_AGGREGATIONS.get(self.kind, "seq_mean_token_mean")
        return self.aggregation


class UpdateConfig(Section):
    """Updates of train.global_batch completions each that a rollout batch becomes."""

    epochs: PositiveInt = 1
    """Number of times that each completion of a rollout batch is trained on."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one forward pass on one replica, into which whole completions are packed with their prompts; `auto`:
    one of the longest."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Source of the old policy's logprobs: a training pass under the weights of the rollout, or the rollout itself,
    which saves that pass and leaves the engine's rounding in the ratio."""


class EvalConfig(Section):
    """Prompts that are never trained on, and how they are answered, every train.eval_interval steps."""

    files: tuple[str, ...] = ()
    """Files as rl.prompts.files; with a built-in task there are none, and problems of another seed are made."""
    num_prompts: PositiveInt = 64
    """Number of prompts: the first ones of the files."""
    samples: PositiveInt = 1
    """Completions per prompt: with k of them pass@k is reported too."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits for these completions; at 0 the likeliest tokens are taken."""


class SamplesConfig(Section):
    """Completions for people to read: all of a rollout batch as JSON lines in `<run_dir>/samples`, some in the log."""

    interval: PositiveInt | None = 10
    """Rollout batches between two that are written; `none`: none is written."""
    shown: NonNegativeInt = 3
    """Number of a batch's completions that are logged as a table."""


class RlConfig(Section):
    """One RL step: prompts, rollouts, rewards, advantages, loss."""

    prompts: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    distill: DistillConfig = DistillConfig()
    ptx: PtxConfig = PtxConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()
    freeze_router: bool = False
    """Train no router: their weights, and the biases on the choice of experts, stay as they are."""

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens after a prompt: of one turn, or with an environment of the conversation."""
        return self.rollout.max_new_tokens if self.environment.name is None else self.environment.max_tokens


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
    """Return the defaults with the fields of `PRESETS[name]`."""
    return RlConfig.model_validate(PRESETS[name])
