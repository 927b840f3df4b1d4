"""The section `rl.reward`: the parts of a completion's reward."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import MODEL_PARTS, SERVED_PARTS, Extension, correct_part
from mcore_rl.config.section import Gibibytes, Seconds, Section, Store, Text

RULES_OF_ANSWERS = ("exact", "numeric", "math", "countdown")
"""Parts of `rl.reward.parts` that are 1 for a right answer and 0 for another."""


ENVIRONMENT_PART = "environment"
"""Part of `rl.reward.parts` that is the sum of the rewards that the environment gave."""


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


class RewardServerConfig(Section):
    """Servers that give rewards, `http:URL` and `judge:FILE`: how each is asked by each replica of the model."""

    batch_size: PositiveInt = 16
    """Completions of one request to a reward server; a judge is asked about one at a time."""
    concurrency: PositiveInt = 8
    """Requests at a time."""
    timeout_s: Seconds = 60.0
    """Seconds for one request."""
    retries: NonNegativeInt = 3
    """Times that a request without an answer is repeated before its scores have failed; a request that the server calls
    wrong (status 400 to 499 but 408 and 429) is not."""
    retry_s: Seconds = 1.0
    """Seconds before the first repetition; each further one waits twice as long."""
    api_key_env: Text | None = None
    """Name of the environment variable with the key that is sent as a bearer token; `none`: none is sent."""
    ca_file: Text | None = None
    """File of the certificates by which https servers are known; `none`: those of the system."""


class JudgeConfig(Section):
    """The part `judge:FILE`: a language model on an OpenAI-compatible server answers a question with a score. FILE is a
    jinja template with `prompt`, `completion`, `answer`, `fields`, `num_tokens` and `is_truncated`.
    """

    url: Text | None = None
    """Address of the server up to and with /v1; /chat/completions below it is asked."""
    model: Text | None = None
    """Name of the model on the server."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the judge's logits; at 0 it answers alike each time."""
    max_tokens: PositiveInt = 512
    """Most tokens of the judge's answer."""
    score_pattern: Text = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match's first group in the answer is the score, a number."""
    scale: PositiveFloat = 1.0
    """Divisor of the score: 10 makes 0 to 1 of scores from 0 to 10."""


class RewardConfig(Section):
    """Reward of a completion: a weighted sum of named parts, each between its own bounds."""

    parts: tuple[str | Extension, ...] = ("exact",)
    """Parts of the reward: `exact`, `positions`, `numeric`, `math`, `countdown`, `code`, `format`, `regex`, `length`,
    `environment` (the sum of the rewards of rl.environment; the other parts then score the last turn), your own
    function as `module:function`; `model:PATH`, a reward model (a checkpoint or run of `mcore-rl rm`), which scores
    prompt and completion at the last token; `step_model:PATH`, a process reward model, which scores the ends of steps;
    `http:URL` (`http://HOST:PORT/PATH`, or https), a reward server; `judge:FILE`, a language model on a server, asked
    what the template says."""
    weights: tuple[float, ...] = ()
    """Weight of each part; an empty list: 1 each."""
    correct: Text | None = "auto"
    """Part that decides which completions are correct: those to which it gives 1 or more. Its weight may be 0; `auto`:
    the first part that is a rule or a function; `none`: no part decides, and no accuracy is reported."""
    code: CodeConfig = CodeConfig()
    server: RewardServerConfig = RewardServerConfig()
    judge: JudgeConfig = JudgeConfig()
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
    whatever fails. A part of weight 0 only measures, and ends no run, unless groups are sampled by it
    (rl.rollout.dynamic_sampling_by)."""
    max_memory_gib: Gibibytes | None = None
    """GiB of address space that a process which computes rewards, and each that it starts, may take beyond what it
    begins with (RLIMIT_AS); a function that needs more gets a MemoryError; `none`: no limit."""
    workers: PositiveInt = 1
    """Processes of each replica that compute rewards."""
    step_separator: Text = "\n"
    """Text after which a step of a completion ends, with `step_model:`; as in the training of the model."""
    step_value: Literal["probability", "score"] = "probability"
    """Value of a step, with `step_model:`; `probability`: that the step is right, sigmoid(score); `score`:
    the score."""
    model_tokenizer: TokenizerConfig | None = None
    """Tokenizer of the reward models; `none`: the one that their runs were trained with, or the policy's where that is
    not known. Texts are tokenised again for a model with another one than the policy's."""
    model_chat_template: Text | None = None
    """Template that makes text of prompt and completion for reward models with a tokenizer of their own; `none`: the
    one that their runs were trained with."""
    model_store: Store = "host"
    """Memory in which the weights of reward models wait for their passes: beside the policy, main memory, or a file
    without a name in the run's folder."""
    normalize_models: bool = False
    """Subtract from the scores of reward models (`model:`) the mean of all their scores so far in the run, and divide
    by their standard deviation; both are saved with each checkpoint."""

    @cached_property
    def model_parts(self) -> tuple[str, ...]:
        """Parts that are reward models, whole or of steps."""
        return tuple(part for part in self.parts if part.startswith(MODEL_PARTS))

    @cached_property
    def served_parts(self) -> tuple[str, ...]:
        """Parts whose scores servers give."""
        return tuple(part for part in self.parts if part.startswith(SERVED_PARTS))

    @cached_property
    def correct_part(self) -> str | None:
        """Part that decides which completions are correct; None: none does."""
        return correct_part(self.correct, self.parts)

    @cached_property
    def weight_of(self) -> Mapping[str, float]:
        """Weight of each part."""
        weights = self.weights or (1.0,) * len(self.parts)
        return dict(zip(self.parts, weights, strict=True))

    @cached_property
    def environment_weight(self) -> float:
        """Weight of the part `environment`; 0 without it."""
        return self.weight_of.get(ENVIRONMENT_PART, 0.0)

    @cached_property
    def of_functions(self) -> "RewardConfig | None":
        """The parts that are functions, not models or the environment, with their weights; None: there are none."""
        rest = [
            (part, weight)
            for part, weight in self.weight_of.items()
            if part not in self.model_parts and part != ENVIRONMENT_PART
        ]
        if not rest:
            return None
        parts, weights = zip(*rest, strict=True)
        correct = self.correct_part if self.correct_part in parts else None
        return self.model_copy(update={"parts": parts, "weights": weights, "correct": correct})
