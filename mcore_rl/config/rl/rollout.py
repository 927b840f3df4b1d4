"""Sampling: the sections `rl.rollout`, `rl.eval` and `rl.samples`."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import MODEL_PARTS, SERVED_PARTS, Extension, correct_part
from mcore_rl.config.section import Gibibytes, Probability, Seconds, Section, Store, Text


class PromptConfig(Section):
    """Prompts and their reference answers."""

    task: Literal["file", "arithmetic", "sorting", "copying", "reversing", "countdown", "seeds"] | Extension = "file"
    """Source of prompts. `file`: `files`. `arithmetic`, `sorting`, `copying`, `reversing`, `countdown`: an unlimited
    number of problems, each determined by the seed and its index. `seeds`: numbers, from which rl.environment makes its
    own problems. `module:name`: an unlimited number of problems from a function of your own (random generator, size ->
    rl.tasks.TaskProblem)."""
    files: tuple[str, ...] = ()
    """JSON lines (also compressed), .parquet, folders of such files, or hub:NAME#CONFIG:SPLIT for a dataset of the
    Hugging Face hub. Each line has a prompt and an answer; its other fields are passed to the reward functions."""
    file_weights: tuple[float, ...] = ()
    """Weight of each of `files` in the mixture: with [3, 1], three of four prompts come from the first. A file that has
    been read completely starts again, in a new order. An empty list: every prompt once per epoch."""
    prompt_field: str = "prompt"
    """Field of a line that holds the prompt: text, or a list of {"role", "content"}. If the prompt ends in a turn of
    the assistant, the completion continues that turn, which is not scored."""
    prompt_template: Text | None = None
    """Template of the prompt, such as "{question} Put the answer in \\boxed{}.": {name} stands for a field of the line,
    {{name}} for the text {name}; `none`: the prompt is `prompt_field`."""
    answer_field: str = "answer"
    """Field of a line that holds the reference answer; a line may lack it if no reward needs it."""
    max_bad: NonNegativeInt | None = 0
    """Maximum number of invalid lines in files: each is left out, counted, and logged with file and line. With more,
    the run ends before it starts. `none`: any number. Training and evaluation count separately."""
    smallest: PositiveInt = 2
    """Minimum size of a built-in task's problem: its number of digits, letters or numbers."""
    largest: PositiveInt = 4
    """Maximum size of a built-in task's problem: its number of digits, letters or numbers."""
    max_tokens: PositiveInt = 1024
    """Maximum length of a prompt in tokens. A longer prompt is left out and counted, or ends the run if it is a
    task's."""


class EnvironmentConfig(Section):
    """An environment that answers the policy, so that a completion has several turns. It runs in its own processes."""

    name: Literal["calculator", "guessing", "python", "reasoning_gym", "textarena"] | Extension | None = None
    """Environment. `calculator`: a tool that computes. `guessing`: the game of guessing a number. `python`: a tool that
    runs Python in a sandbox (bubblewrap). `reasoning_gym`: a dataset of reasoning-gym, in a single turn. `textarena`: a
    game of TextArena for a single player. `module:name`: a class of your own (rl.environments.interface.Environment).
    `none`: no environment, a completion is a single turn."""
    arguments: dict[str, str | bool | int | float] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Arguments of the environment's class, such as dataset = "chain_sum" for `reasoning_gym`."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy; a conversation that reaches it is truncated."""
    max_tokens: PositiveInt = 4096
    """Maximum number of tokens of a conversation after its prompt, including the environment's. If less than
    rl.rollout.max_new_tokens is left, no further turn begins, and the conversation is truncated."""
    timeout_s: Seconds = 10.0
    """Seconds that the environment may take for an answer; after that it has failed."""
    max_memory_gib: Gibibytes | None = None
    """Address space in GiB (RLIMIT_AS) that each process of the environment may take beyond its initial size, including
    the processes that it starts; `none`: no limit."""
    workers: PositiveInt = 1
    """Number of processes of each replica that run the environment."""


RULES_OF_ANSWERS = ("exact", "numeric", "math", "countdown")
"""Parts of `rl.reward.parts` that are 1 for a right answer and 0 otherwise."""


ENVIRONMENT_PART = "environment"
"""Part of `rl.reward.parts` that is the sum of the environment's rewards."""


class CodeConfig(Section):
    """The part `code`, which runs the program in a completion against the tests of its prompt, in bubblewrap."""

    python: Text | None = None
    """Python interpreter for the programs, with its packages, such as that of a virtual environment; `none`: the
    interpreter of this run, without packages."""
    tests_field: Text = "tests"
    """Field of a prompt that holds its tests: a list of {"input", "output"}, where the program reads the input and must
    write the output; {"inputs": [...], "outputs": [...]}, the same as two lists; or Python, a text or a list of texts
    such as asserts, that runs after the program. A text may also be the JSON of these."""
    timeout_s: Seconds = 8.0
    """Seconds for all tests of a completion together; tests that have not passed by then have failed."""
    memory_mib: PositiveInt = 512
    """Limit in MiB on the program's address space and on the files that it writes."""
    partial: bool = False
    """Reward the fraction of the tests that pass. false: 1 if all pass, else 0."""


class RewardServerConfig(Section):
    """Servers that give rewards (`http:URL`, `judge:FILE`), and how each replica of the model requests rewards from
    them.
    """

    batch_size: PositiveInt = 16
    """Number of completions per request to a reward server; a request to a judge always has one completion."""
    concurrency: PositiveInt = 8
    """Number of requests that each replica has open at a time."""
    timeout_s: Seconds = 60.0
    """Seconds that a single request may take."""
    retries: NonNegativeInt = 3
    """Number of times that a request without an answer is repeated before its scores have failed. A request that the
    server rejects (status 400 to 499 except 408 and 429) is not repeated."""
    retry_s: Seconds = 1.0
    """Seconds before the first repetition; each further repetition waits twice as long as the previous."""
    api_key_env: Text | None = None
    """Name of the environment variable that holds the key, which is sent as a bearer token; `none`: no key."""
    ca_file: Text | None = None
    """File of the certificates that verify https servers; `none`: the system's certificates."""


class JudgeConfig(Section):
    """The part `judge:FILE`: a language model on an OpenAI-compatible server gives a score. FILE is a jinja template of
    the question, with `prompt`, `completion`, `answer`, `fields`, `num_tokens` and `is_truncated`.
    """

    url: Text | None = None
    """Address of the server up to and including /v1, such as http://judge:8000/v1."""
    model: Text | None = None
    """Name of the model on the server."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0: it gives the same answer each time."""
    max_tokens: PositiveInt = 512
    """Maximum number of tokens of the judge's answer."""
    score_pattern: Text = r"(?i)(?:scores?(?:\s*\([^()\n]*\))?+|total\W{0,3}[:=])\W{0,9}(\d)"
    """Regular expression that finds the score in the answer: the number at the first group of its last match. The
    number is read whole even if the group holds only a part of it, and 7/10 is 7. Without a single number the score has
    failed."""
    scale: PositiveFloat = 1.0
    """Divisor of the score: 10 maps scores from 0 to 10 to values from 0 to 1."""


class RewardConfig(Section):
    """Reward of a completion: a weighted sum of named parts."""

    parts: tuple[str | Extension, ...] = ("exact",)
    """Parts of the reward: `exact`, `positions`, `numeric`, `math`, `countdown`, `code`, `format`, `regex`, `length`.
    `environment`: the sum of the rewards of rl.environment; the other parts then score the last turn.
    `module:function`: a function of your own. `model:PATH`: a reward model (a checkpoint or run of `mcore-rl rm`),
    which scores prompt and completion at the last token. `step_model:PATH`: a process reward model, which scores the
    ends of steps. `http:URL` (`http://HOST:PORT/PATH`, or https): a reward server. `judge:FILE`: a language model on a
    server, asked with the template FILE."""
    weights: tuple[float, ...] = ()
    """Weight of each part; an empty list: each part has the weight 1."""
    correct: Text | None = "auto"
    """Part that decides which completions are correct: those for which it gives 1 or more. Its weight may be 0. `auto`:
    the first part that is a rule or a function. `none`: no part decides, and no accuracy is reported."""
    code: CodeConfig = CodeConfig()
    server: RewardServerConfig = RewardServerConfig()
    judge: JudgeConfig = JudgeConfig()
    answer_pattern: Text | None = None
    """Regular expression that finds the answer in a completion: the first group of its last match. `none`: the answer
    is the whole text."""
    format_pattern: Text | None = None
    """Regular expression of the part `format`, which is 1 if the whole completion matches."""
    regex_pattern: Text | None = None
    """Regular expression of the part `regex`, which is 1 if it matches anywhere."""
    length_min_tokens: NonNegativeInt = 0
    """Minimum length for the part `length`: a shorter completion loses the missing fraction, from 0 to -1."""
    length_max_tokens: PositiveInt | None = None
    """Maximum length for the part `length`: a longer completion loses the excess fraction, at most 1. `none`: no
    limit."""
    overlong_buffer_tokens: PositiveInt | None = None
    """Number of tokens before the maximum length (rollout.max_new_tokens, or environment.max_tokens with an
    environment) over which the reward falls linearly by `overlong_penalty` (DAPO); `none`: no penalty."""
    overlong_penalty: PositiveFloat = 1.0
    """With `overlong_buffer_tokens`, reward that a completion of the maximum length loses."""
    timeout_s: Seconds = 10.0
    """Seconds that a part may take per completion; after that its score has failed."""
    error_value: float | None = None
    """Value of a part whose score failed: it raised, returned no finite number, took too long, or its process died.
    `none`: the completion has no reward, and is left out of the loss and of its group's statistics."""
    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Maximum fraction of a part's scores in a rollout batch that may fail; above it the run ends. 1: the run never
    ends for this reason. A part of weight 0 only measures, and never ends the run unless groups are sampled by it
    (rl.rollout.dynamic_sampling_by)."""
    max_memory_gib: Gibibytes | None = None
    """Address space in GiB (RLIMIT_AS) that each process that computes rewards may take beyond its initial size,
    including the processes that it starts. A function that needs more gets a MemoryError. `none`: no limit."""
    workers: PositiveInt = 1
    """Number of processes of each replica that compute rewards."""
    step_separator: Text = "\n"
    """Text that ends a step of a completion, for `step_model:`; it must be that of the model's training."""
    step_value: Literal["probability", "score"] = "probability"
    """Value of a step, for `step_model:`. `probability`: that the step is right, sigmoid(score). `score`: the score."""
    model_tokenizer: TokenizerConfig | None = None
    """Tokenizer of the reward models; `none`: that of their training, or the policy's if that is unknown. Texts are
    tokenized again for a model whose tokenizer differs from the policy's."""
    model_chat_template: Text | None = None
    """Chat template of reward models with a tokenizer of their own; `none`: that of their training."""
    model_store: Store = "host"
    """Memory in which reward models wait for their passes. `device`: the policy's. `host`: main memory."""
    normalize_models: bool = False
    """Normalize the scores of reward models (`model:`) by the mean and standard deviation of all their scores so far in
    the run. Both are saved with each checkpoint."""

    @cached_property
    def model_parts(self) -> tuple[str, ...]:
        """Parts that are reward models, whole or of steps."""
        return tuple(part for part in self.parts if part.startswith(MODEL_PARTS))

    @cached_property
    def served_parts(self) -> tuple[str, ...]:
        """Parts that are scored by servers."""
        return tuple(part for part in self.parts if part.startswith(SERVED_PARTS))

    @cached_property
    def correct_part(self) -> str | None:
        """Part that decides which completions are correct; None if no part does."""
        return correct_part(self.correct, self.parts)

    @cached_property
    def weight_of(self) -> Mapping[str, float]:
        """Weight of each part."""
        weights = self.weights or (1.0,) * len(self.parts)
        return dict(zip(self.parts, weights, strict=True))

    @cached_property
    def part_weights(self) -> tuple[float, ...]:
        """Weights of the parts, in order, and of the length penalty if there is one."""
        return (*self.weight_of.values(), *([1.0] if self.overlong_buffer_tokens else []))

    @cached_property
    def environment_weight(self) -> float:
        """Weight of the part `environment`; 0 without it."""
        return self.weight_of.get(ENVIRONMENT_PART, 0.0)

    @cached_property
    def scored_by_functions(self) -> "RewardConfig | None":
        """This section with only the parts that are not models or the environment; None if there are no such parts."""
        return self.only(lambda part: part not in self.model_parts and part != ENVIRONMENT_PART)

    def only(self, keep: Callable[[str], bool]) -> "RewardConfig | None":
        """Return this section with only the parts that `keep` returns true for; None if there are no such parts."""
        rest = [(part, weight) for part, weight in self.weight_of.items() if keep(part)]
        if not rest:
            return None
        parts, weights = zip(*rest, strict=True)
        correct = self.correct_part if self.correct_part in parts else None
        return self.model_copy(update={"parts": parts, "weights": weights, "correct": correct})


NATIVE_SLOTS = 64
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""


class EngineConfig(Section):
    """How completions are generated, in this process or by inference servers. This affects speed and memory, not the
    distribution that is sampled from.
    """

    kind: str
    """Engine. `native`: the modules that train. `vllm`, `sglang`: servers, started by the run (`count`) or before it
    (`urls`), which get the new weights after every rollout batch. `module:name`: a function of your own with the
    arguments of rl.engines.base.MakeEngine, which returns an rl.engines.base.Engine."""
    slots: PositiveInt | Literal["auto"] = "auto"
    """Maximum number of completions in progress. `native`: on each replica of the model; each takes memory for the keys
    and values of the longest sample. Servers: on each server that is started (--max-num-seqs, --max-running-requests).
    `auto`: 64, or the server's own choice."""

    @cached_property
    def is_served(self) -> bool:
        """Whether inference servers make the completions."""
        return isinstance(self, ServedConfig)


class InProcessConfig(EngineConfig):
    """Steps of an engine on the modules that train, or on copies of them."""

    step_tokens: PositiveInt = 2048
    """Maximum number of tokens per step: a token for each completion in progress, and parts of prompts."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Replay steps without prompts as CUDA graphs, which launch all kernels of a step at once. `auto`: on a GPU that
    holds the whole model, if the host reads nothing within a step. This has not run on a GPU yet."""

    @cached_property
    def native_slots(self) -> int:
        """Completions in progress at a time on each replica of the model."""
        return NATIVE_SLOTS if self.slots == "auto" else self.slots


class ServersConfig(EngineConfig):
    """Inference servers."""

    count: NonNegativeInt = 0
    """Number of servers that the run starts on the machine of its first rank, and ends with itself."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers, such as http://node7:8000, instead of `count`."""
    servers_dir: Text | None = None
    """Folder for servers that come and go during the run, in addition to `urls`: `mcore-rl serve` with the same field
    keeps a file there for each of its servers. `none`: only the servers of `urls`."""
    command: tuple[str, ...] = ()
    """Program that starts a server, with its first arguments, such as ["venv-vllm/bin/python", "-m",
    "vllm.entrypoints.openai.api_server"]. An empty list: the vLLM or SGLang module of this run's Python."""
    args: tuple[str, ...] = ()
    """Further arguments for each server that is started, such as ["--gpu-memory-utilization", "0.8"]."""
    devices: tuple[NonNegativeInt, ...] = ()
    """GPUs for the servers that are started, `tensor_parallel` for each in order, counted from 0 among the GPUs that
    the run sees. Ranks take the first GPUs. A run on GPUs that starts servers must set this."""
    environment: dict[str, str] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Environment variables for the servers that are started, in addition to the run's, which they get without those
    set for training, such as PYTORCH_CUDA_ALLOC_CONF and NCCL_ALGO."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs of each server that is started."""
    share_gpus: bool = False
    """Start servers on the GPUs of the ranks, a server for every `tensor_parallel` neighbouring ranks, instead of
    `count` or `urls`. They sleep while the policy trains; while they generate, its optimizer state and gradients are in
    main memory (rl.update.store = "host")."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the servers' weights; `auto`: platform.precision."""
    max_model_len: PositiveInt | Literal["auto"] = "auto"
    """Maximum tokens of prompt and completion together that a server accepts; `auto`: those of the longest sample."""
    requests: PositiveInt = 256
    """Maximum number of completions that each replica of the trained model requests from servers at a time; fewer while
    more than a tenth of the requests on the servers wait there."""
    attempts: PositiveInt = 3
    """Number of attempts per completion, each on a server that has not failed it yet, if there is any."""
    min_servers: PositiveInt = 1
    """Minimum number of servers with the current weights; with fewer the run ends."""
    start_timeout_s: Seconds = 900.0
    """Seconds that a server that is started, or that `urls` names, may take to answer for the first time."""
    request_timeout_s: Seconds = 1800.0
    """Seconds that a server may take for a completion."""
    update_timeout_s: Seconds = 600.0
    """Seconds that a server may take for each call of a weight update."""
    lora: Literal["merged", "adapter"] = "merged"
    """Weights that servers get from a policy with low-rank adapters. `merged`: all weights, with the adapters added.
    `adapter`: only the adapters, each time under a new name, for a base model that the servers have loaded
    themselves."""
    base_model: Text | None = None
    """Hugging Face folder of the base model, which servers that are started load with `lora` = "adapter"; `none`: they
    get all weights from the trainer."""
    transport_dir: Text | None = None
    """Folder for weights on their way to the servers, visible to trainer and servers; `none`: /dev/shm (one
    machine)."""
    probe_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Limit in nats on the difference between a server's and the trainer's logprobs of fixed texts after an update: on
    the largest difference if both compute in fp32, else on the mean. `auto`: 2e-4 in fp32, else three times the mean
    that rounding makes within the trainer, at most 0.1; the tokens of each expert are then also compared with the
    rest."""
    api_key_env: Text | None = None
    """Name of the environment variable that holds the key which servers require (--api-key); `none`: no key."""
    ca_file: Text | None = None
    """File of the certificates that verify https servers of `urls`; `none`: the system's certificates."""


class ServedConfig(ServersConfig):
    """Inference servers of a kind that the run can start and update."""

    kind: Literal["vllm", "sglang"]
    weights: Literal["as_trained", "fp8_block"] = "as_trained"
    """Form in which servers get the weights; `as_trained`: in the trainer's type; `fp8_block`, of vLLM: the matrices of
    attention, MLPs and experts as 8-bit numbers (e4m3) with a scale for each block of 128 x 128, all others as trained.
    Servers then round the inputs of these products to 8 bits too; not yet run on a GPU."""

    @cached_property
    def in_fp8(self) -> bool:
        """Whether servers get the matrices of linear layers in fp8 blocks."""
        return self.weights == "fp8_block"

    @cached_property
    def way(self) -> Literal["files", "nccl", "ipc"]:
        """How new weights reach the servers."""
        return "files"

    @cached_property
    def is_started(self) -> bool:
        """Whether the run starts the servers."""
        return bool(self.count) or self.share_gpus


class NativeConfig(InProcessConfig):
    """Generation by the modules that train."""

    kind: Literal["native"] = "native"


class VllmConfig(ServedConfig):
    """Servers of vLLM."""

    kind: Literal["vllm"] = "vllm"
    transport: Literal["files", "nccl", "ipc"] = "files"
    """How new weights reach the servers. `files`: files in `transport_dir`. `nccl`: a broadcast between GPUs. `ipc`:
    with `share_gpus`, memory of each GPU that its rank and its server see; not yet run on a GPU."""
    delta: bool = False
    """Send files with only what has changed in the weights since the last update. Ranks keep the bytes that they sent,
    and each worker of a server keeps all of them, in main memory."""

    @cached_property
    def way(self) -> Literal["files", "nccl", "ipc"]:
        """How new weights reach the servers."""
        return self.transport


class SglangConfig(ServedConfig):
    """Servers of SGLang, which read new weights from files."""

    kind: Literal["sglang"] = "sglang"


class OwnEngineConfig(ServersConfig, InProcessConfig):
    """A user-defined function, which may read any field."""

    kind: Extension


SERVED: dict[str, type[VllmConfig | SglangConfig]] = {"vllm": VllmConfig, "sglang": SglangConfig}
"""Sections of servers by their kind."""
AnyEngine = NativeConfig | VllmConfig | SglangConfig | OwnEngineConfig


MIN_TEMPERATURE = 1e-6
"""Smallest temperature other than 0: logits divided by much less are not finite in float32."""


class RolloutConfig(Section):
    """How many completions are sampled for a rollout batch, and how."""

    prompts_per_step: PositiveInt = 16
    """Number of prompts per rollout batch, over all ranks."""
    group_size: PositiveInt = 8
    """Number of completions per prompt, with which most advantages compare a completion."""
    max_new_tokens: PositiveInt = 1024
    """Maximum number of tokens of a completion; a completion that reaches it without an end is truncated."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; 0: the most likely token is taken. Training uses the tempered distribution too."""
    top_k: PositiveInt | None = None
    """Number of most likely tokens to sample from; `none`: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Total probability of the most likely tokens to sample from; 1: all tokens."""
    min_p: Probability = 0.0
    """Minimum probability of a token to sample, as a fraction of the most likely token's; 0: all tokens."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the model's end tokens. With every engine they stay in the text, as
    if servers had include_stop_str_in_output: the text that is scored is the text that is trained on."""
    stop_tokens: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a completion, in addition to the end of the assistant's turn in the chat template, the
    tokenizer's eos_token, eos_token_id in the generation_config.json next to it, and the end of a document."""
    max_staleness: NonNegativeInt = 0
    """Maximum age, in rollout batches, of the weights that sample a token, compared with the weights that train on it.
    Servers generate up to this many batches ahead while the policy trains, and continue with the new weights when these
    arrive. 0: the policy trains and generates in turn."""
    dynamic_sampling: bool = False
    """Replace groups whose completions do not differ (`dynamic_sampling_by`: all right or all wrong, or of equal
    reward) by groups of new prompts (DAPO)."""
    dynamic_sampling_by: Literal["auto", "accuracy", "reward"] = "auto"
    """How the completions of a group must differ, with `dynamic_sampling`. `accuracy`: in whether they are correct
    (rl.reward.correct), as in the paper; groups that differ only in their length are replaced. `reward`: in the whole
    reward. `auto`: `accuracy` if a rule decides (exact, numeric, math, countdown, code without `partial`), else
    `reward`."""
    max_refills: PositiveInt = 4
    """Maximum number of further rollouts per step with `dynamic_sampling`, each with as many prompts as are likely to
    fill it; after that the step trains on the groups that it has. Surplus groups are not trained on, and their prompts
    come again."""

    @cached_property
    def cuts(self) -> list[str]:
        """Fields, with their values, that restrict sampling to a part of the distribution."""
        off = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
        return [f"rl.rollout.{name}={value}" for name in off if (value := getattr(self, name)) != off[name]]


class EvalConfig(Section):
    """Prompts that are never trained on, answered every train.eval_interval steps."""

    files: tuple[str, ...] = ()
    """Files, as rl.prompts.files; a built-in task needs none, and makes problems from a different seed."""
    num_prompts: PositiveInt = 64
    """Number of prompts, from the beginning of the files."""
    samples: PositiveInt = 1
    """Number of completions per prompt; with k of them, pass@k is reported too."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits for these completions; 0: the most likely tokens are taken."""


class SamplesConfig(Section):
    """Completions for people to read: all completions of a rollout batch and of an evaluation as JSON lines in
    `<run_dir>/samples`, and a few of the batch in the log.
    """

    interval: PositiveInt | None = 10
    """Interval, in rollout batches, at which completions are written; `none`: never, not even those of evaluations."""
    shown: NonNegativeInt = 3
    """Number of completions of a batch that are logged as a table; 0: no table."""
