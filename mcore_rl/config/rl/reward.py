"""The section `rl.reward`: the parts of a completion's reward."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import MODEL_PARTS, SERVED_PARTS, Extension, correct_part
from mcore_rl.config.section import Gibibytes, Seconds, Section, Store, Text

RULES_OF_ANSWERS = ("exact", "numeric", "math", "countdown")
"""Parts of `rl.reward.parts` that are 1 for a right answer and 0 otherwise."""


ENVIRONMENT_PART = "environment"
"""Part of `rl.reward.parts` that is the sum of the environment's rewards."""


class CodeConfig(Section):
    """The part `code`: the program in a completion is run against the tests of its prompt, in bubblewrap."""

    python: Text | None = None
    """Interpreter of the programs, with its packages, such as a virtual environment's; `none`: the interpreter of this
    run, without packages."""
    tests_field: Text = "tests"
    """Field of a prompt with its tests: a list of {"input", "output"}, where the program reads the input and must write
    the output; {"inputs": [...], "outputs": [...]}, the same as two lists; a text or a list of texts with Python, such
    as asserts, that runs after the program. A text may also be the JSON of these."""
    timeout_s: Seconds = 8.0
    """Seconds that all tests of a completion may take together; tests that have not passed by then have failed."""
    memory_mib: PositiveInt = 512
    """Limit in MiB on the address space of the program, and on the files that it writes."""
    partial: bool = False
    """Reward the fraction of the tests that pass; otherwise 1 if all do, else 0."""


class RewardServerConfig(Section):
    """Servers that give rewards, `http:URL` and `judge:FILE`: how each replica of the model requests rewards from
    each.
    """

    batch_size: PositiveInt = 16
    """Completions per request to a reward server; a request to a judge has a single completion."""
    concurrency: PositiveInt = 8
    """Number of requests at a time."""
    timeout_s: Seconds = 60.0
    """Seconds per request."""
    retries: NonNegativeInt = 3
    """Number of times that a request without an answer is repeated before its scores have failed; a request that the
    server rejects (status 400 to 499 except 408 and 429) is not repeated."""
    retry_s: Seconds = 1.0
    """Seconds before the first repetition; each further repetition waits twice as long."""
    api_key_env: Text | None = None
    """Name of the environment variable with the key that is sent as a bearer token; `none`: no key is sent."""
    ca_file: Text | None = None
    """File of the certificates to verify https servers with; `none`: the system's certificates."""


class JudgeConfig(Section):
    """The part `judge:FILE`: a language model on an OpenAI-compatible server answers a question with a score. FILE is a
    jinja template with `prompt`, `completion`, `answer`, `fields`, `num_tokens` and `is_truncated`.
    """

    url: Text | None = None
    """Address of the server up to and including /v1; requests go to /chat/completions below it."""
    model: Text | None = None
    """Name of the model on the server."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; at 0 its answer is the same each time."""
    max_tokens: PositiveInt = 512
    """Maximum number of tokens of the judge's answer."""
    score_pattern: Text = r"(?i)(?:scores?(?:\s*\([^()\n]*\))?+|total\W{0,3}[:=])\W{0,9}(\d)"
    """Regular expression that finds the score in the answer: the number at the first group of its last match, which is
    read whole even where the group has only a part of it. 7/10 is 7; without a single number the score has failed."""
    scale: PositiveFloat = 1.0
    """Divisor of the score: 10 maps scores from 0 to 10 to values from 0 to 1."""


class RewardConfig(Section):
    """Reward of a completion: a weighted sum of named parts, each between its own bounds."""

    parts: tuple[str | Extension, ...] = ("exact",)
    """Parts of the reward: `exact`, `positions`, `numeric`, `math`, `countdown`, `code`, `format`, `regex`, `length`,
    `environment` (the sum of the rewards of rl.environment; the other parts then score the last turn), your own
    function as `module:function`; `model:PATH`, a reward model (a checkpoint or run of `mcore-rl rm`), which scores
    prompt and completion at the last token; `step_model:PATH`, a process reward model, which scores the ends of steps;
    `http:URL` (`http://HOST:PORT/PATH`, or https), a reward server; `judge:FILE`, a language model on a server, asked
    with the template FILE."""
    weights: tuple[float, ...] = ()
    """Weight of each part; an empty list: 1 for each."""
    correct: Text | None = "auto"
    """Part that decides which completions are correct: a value of 1 or more is correct. Its weight may be 0; `auto`:
    the first part that is a rule or a function; `none`: no part decides, and no accuracy is reported."""
    code: CodeConfig = CodeConfig()
    server: RewardServerConfig = RewardServerConfig()
    judge: JudgeConfig = JudgeConfig()
    answer_pattern: Text | None = None
    """Regular expression that finds the answer in a completion: the first group of its last match; `none`: the answer
    is the whole text."""
    format_pattern: Text | None = None
    """Regular expression of the part `format`, which is 1 if the whole completion matches."""
    regex_pattern: Text | None = None
    """Regular expression of the part `regex`, which is 1 if it matches anywhere."""
    length_min_tokens: NonNegativeInt = 0
    """Minimum length for the part `length`: a shorter completion loses the missing fraction, from 0 to -1."""
    length_max_tokens: PositiveInt | None = None
    """Maximum length for the part `length`: a longer completion loses the excess fraction, at most 1; `none`: no
    limit."""
    overlong_buffer_tokens: PositiveInt | None = None
    """Tokens before rollout.max_new_tokens, or environment.max_tokens with an environment, over which the reward falls
    linearly by `overlong_penalty` (DAPO); `none`: no penalty."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward that a completion of the maximum length loses, with `overlong_buffer_tokens`."""
    timeout_s: Seconds = 10.0
    """Seconds that a part may take for each completion; after that its score has failed."""
    error_value: float | None = None
    """Value of a part with a score that failed: it raised, returned no finite number, took too long, or its process
    died; `none`: the completion has no reward, and is left out of the statistics of its group and of the loss."""
    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Maximum fraction of a part's scores in a rollout batch that may fail; above it the run ends; 1: the run continues
    whatever fails. A part of weight 0 only measures, and never ends the run, unless groups are sampled by it
    (rl.rollout.dynamic_sampling_by)."""
    max_memory_gib: Gibibytes | None = None
    """GiB of address space that a process which computes rewards, and each that it starts, may take beyond its initial
    size (RLIMIT_AS); a function that needs more gets a MemoryError; `none`: no limit."""
    workers: PositiveInt = 1
    """Processes of each replica that compute rewards."""
    step_separator: Text = "\n"
    """Text that ends a step of a completion, for `step_model:`; as in the training of the model."""
    step_value: Literal["probability", "score"] = "probability"
    """Value of a step, for `step_model:`; `probability`: the probability that the step is right, sigmoid(score);
    `score`: the score."""
    model_tokenizer: TokenizerConfig | None = None
    """Tokenizer of the reward models; `none`: the tokenizer that their runs were trained with, or the policy's if that
    is unknown. If a model's tokenizer differs from the policy's, texts are tokenised again."""
    model_chat_template: Text | None = None
    """Template that renders prompt and completion as text for reward models with a tokenizer of their own; `none`: the
    template that their runs were trained with."""
    model_store: Store = "host"
    """Memory in which the weights of reward models wait for their passes; `device`: the policy's; `host`: main
    memory."""
    normalize_models: bool = False
    """Normalize the scores of reward models (`model:`) by the mean and the standard deviation of all their scores so
    far in the run; both are saved with each checkpoint."""

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
    def environment_weight(self) -> float:
        """Weight of the part `environment`; 0 without it."""
        return self.weight_of.get(ENVIRONMENT_PART, 0.0)

    @cached_property
    def of_functions(self) -> "RewardConfig | None":
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
