"""The data of trainings on preferences: reward models, DPO and its family."""

from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section, Text


class PreferenceDataConfig(Section):
    """Preferences between answers to a prompt, shuffled by train.seed. All compared answers to a prompt are packed into
    the same microbatch, and do not attend to each other.
    """

    train: tuple[str, ...] = ()
    """Data to train on: files of JSON lines (also compressed) or .parquet, or folders of them, one comparison per
    line or row, or datasets of the Hugging Face hub as hub:NAME#CONFIG:SPLIT."""
    train_weights: tuple[float, ...] = ()
    """Weight of each entry of `train` in the mixture, in prompts: with [3, 1], three of four prompts are from the
    first. An entry that has been read starts again in a new order. An empty list: every prompt once per epoch."""
    valid: tuple[str, ...] = ()
    """Data to evaluate on, in the same forms; an empty list: no evaluation."""
    format: Literal["auto", "pair", "ranking", "hh", "steps"] = "auto"
    """Form of a line; `pair`: {"prompt", "chosen", "rejected"} with texts or lists of {"role", "content"}; without a
    prompt, the common beginning of both sides is the prompt; `ranking`: {"prompt", "responses"} with responses from
    best to worst, or with "scores"; `hh`: "chosen" and "rejected" as in Anthropic's HH-RLHF, each a whole dialogue of
    "Human:" and "Assistant:"; `steps`: {"prompt", "completions", "labels"}, the steps of an answer and whether each is
    right, for a process reward model; `auto`: by the keys of each line, with `hh` if both sides begin as such a
    dialogue, but never `steps`."""
    prompt_field: Text = "prompt"
    """Field of a line with the prompt, a text or chat turns; a line may lack it."""
    messages_field: Text = "messages"
    """Field of a line with the prompt as turns, for lines without `prompt_field`."""
    chosen_field: Text = "chosen"
    """Field of a line with the better answer, a text or turns; turns may begin with the turns of the prompt."""
    rejected_field: Text = "rejected"
    """Field of a line with the worse answer, in the same form."""
    responses_field: Text = "responses"
    """Field of a line with the answers of a ranking, a list; every two of them make a pair."""
    scores_field: Text = "scores"
    """Field of a line with a score for each answer of a ranking, higher is better; if a line lacks it, its answers are
    ranked from best to worst. Equal scores are a tie."""
    steps_field: Text = "completions"
    """Field of a line with the steps of an answer, a list of texts, for format="steps"."""
    labels_field: Text = "labels"
    """Field of a line with a label for each step: true or false, the probability that it is right, or null, with which
    the step is not trained on."""
    step_separator: Text = "\n"
    """Text between two steps of an answer. A step ends after it; the last step ends with the answer."""
    tie_field: Text = "tie"
    """Field of a line that is true if neither answer is better."""
    margin_field: Text | None = "margin"
    """Field of a line with the margin by which the better answer is better, a number; `none`, or a line without it: 0.
    If it is "scores", the margin of a ranking's pair is the difference of their scores."""
    ties: Literal["train", "skip"] = "train"
    """Treatment of ties; `train`: a tie counts half as a win of either side; `skip`: it is left out and counted."""
    prompt_template: Text | None = None
    """Template of the prompt, in which {name} is a field of the line ({{name}} is the text {name}), such as "Question:
    {question}"; `none`: the prompt is `prompt_field`."""
    max_bad: NonNegativeInt | None = 0
    """Number of lines that may be invalid: they are left out, counted, and logged with file and line. With more, the
    run ends before it starts; `none`: any number."""
    chat_template: str = "tokenizer"
    """Template that renders prompt and answer as text; `tokenizer`: the template in the tokenizer's folder; `plain`:
    "role:" above each turn; `raw`: the turns end to end with nothing between; anything else: a file with a jinja
    template. Use the template of the fine-tuning."""
    seq_length: PositiveInt = 1024
    """Maximum number of tokens of a prompt with a single answer."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of a prompt if it is longer than `seq_length` with an answer, or longer than a microbatch with all
    compared answers; `error`: the run ends before it starts; `skip`: the prompt is left out and counted."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Positions of a forward pass, into which whole pairs are packed; `auto`: twice `seq_length`."""
    tokenizer: TokenizerConfig = TokenizerConfig()

    @cached_property
    def has_steps(self) -> bool:
        """Whether the data consists of answers with labelled steps instead of pairs."""
        return self.format == "steps"


class PreferenceRunConfig(RunConfig):
    """A training on preferences. `train.global_batch` counts pairs, or answers with labelled steps; a batch is a few
    pairs larger if the answers to its last prompt make several.
    """

    data: PreferenceDataConfig = PreferenceDataConfig()

    @cached_property
    def packed_length(self) -> int:
        """Maximum number of positions of a forward pass."""
        wanted = self.data.tokens_per_microbatch
        if wanted == "auto":
            longest = -(-self.data.seq_length // self.mesh.zigzag) * self.mesh.zigzag
            wanted = 2 * longest
        return -(-wanted // self.packed_multiple) * self.packed_multiple


DPOKind = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo"]


class DPOSection(Section):
    """Loss on pairs of answers. The reward of an answer is beta times its gain in logprob over the reference."""

    loss: DPOKind = "sigmoid"
    """Loss of a pair; `sigmoid`: DPO (arXiv 2305.18290), with `label_smoothing` cDPO; `robust`: DPO without the bias of
    flipped labels (arXiv 2403.00409); `ipo`: squared distance to 1 / (2 beta) (arXiv 2310.12036); `hinge`: the hinge
    loss of RSO (arXiv 2309.06657); `simpo`: mean logprobs, without a reference (arXiv 2405.14734); `orpo`: odds ratio
    and cross entropy, without a reference (arXiv 2403.07691)."""
    beta: PositiveFloat = 0.1
    """Factor on the rewards: with a larger value the policy stays closer to the reference. For orpo, the weight of the
    odds ratio. SimPO's paper uses 2.0 to 2.5, ORPO's 0.1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair in the data has its answers swapped."""
    length_normalised: bool | Literal["auto"] = "auto"
    """Whether an answer's logprob is divided by its number of tokens; `auto`: for simpo and orpo."""
    target_margin: NonNegativeFloat = 0.0
    """Margin by which the chosen answer's reward should be larger: SimPO's gamma, 0.3 to 1.6 in its paper."""
    margin_coeff: NonNegativeFloat = 0.0
    """Factor on the margin of a pair in the data (data.margin_field), which is added to `target_margin` as in ODPO
    (arXiv 2402.10571); 0: margins are not used."""
    nll_coeff: NonNegativeFloat | Literal["auto"] = "auto"
    """Weight of the chosen answer's cross entropy per token, which keeps its logprob from falling (arXiv 2404.19733);
    `auto`: 1 for orpo, otherwise 0."""
    reference: Text | None = None
    """Checkpoint of the reference model; `none`: the weights that the run starts from."""
    reference_cache: Text | Literal["auto"] = "auto"
    """Folder for the reference's logprobs, which runs on the same data from the same checkpoint can share; `auto`:
    `<run_dir>/reference_logprobs`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens with fp32 logits at a time; for deferred logits, `platform.logits_chunk_tokens` applies."""

    @cached_property
    def uses_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss not in ("simpo", "orpo")

    @cached_property
    def is_length_normalised(self) -> bool:
        """`length_normalised` with "auto" resolved."""
        auto = self.length_normalised == "auto"
        return self.loss in ("simpo", "orpo") if auto else bool(self.length_normalised)

    @cached_property
    def nll_weight(self) -> float:
        """`nll_coeff` with "auto" resolved."""
        return float(self.loss == "orpo") if self.nll_coeff == "auto" else self.nll_coeff


class DPOConfig(PreferenceRunConfig):
    """`mcore-rl dpo`."""

    run_dir: str = "runs/dpo"
    dpo: DPOSection = DPOSection()


class RewardModelSection(Section):
    """The loss on pairs: -log sigmoid(chosen - rejected - margin) of the scores at the answers' last tokens (arXiv
    2203.02155). With data.format="steps" it is the cross entropy between each step's label and the score at the step's
    last token (arXiv 2305.20050).
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair in the data has its answers swapped, or that the label of a step is wrong."""
    margin_coeff: NonNegativeFloat = 1.0
    """Factor on the margin of a pair in the data (data.margin_field), by which the chosen score must be larger (arXiv
    2307.09288); 0: margins are not used."""
    centering_coeff: NonNegativeFloat = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0 (arXiv 2312.09244; TRL's
    center_rewards_coefficient, where 0.01 is usual)."""
    shift: Literal["auto", "chosen", "none"] = "auto"
    """Number that is subtracted from all scores after the last step; `chosen`: the mean score of the chosen answers of
    the evaluation (without an evaluation, of as many training pairs), which then score 0 on average (arXiv 2203.02155);
    `none`: nothing. Either way, comparisons of pairs are the same. `auto`: `chosen` with pairs, `none` with steps, for
    which scores are logits of probabilities."""


class RewardModelConfig(PreferenceRunConfig):
    """`mcore-rl rm`."""

    run_dir: str = "runs/rm"
    rm: RewardModelSection = RewardModelSection()
    trains_scores: ClassVar[bool] = True
    """Always true: the model has a scalar head."""

    @cached_property
    def shifts_scores(self) -> bool:
        """Whether a number is subtracted from all scores after the last step."""
        return self.rm.shift == "chosen" or (self.rm.shift == "auto" and not self.data.has_steps)
