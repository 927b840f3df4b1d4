"""The data of trainings on preferences: reward models, DPO and its family."""

from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section, Text


class PreferenceDataConfig(Section):
    """Preferences between answers to a prompt, shuffled by train.seed. All compared answers to a prompt are packed into
    the same microbatch, where they do not attend to each other.
    """

    train: tuple[str, ...] = ()
    """Data to train on: JSON lines (also compressed), .parquet, or folders of such files, with one comparison per line
    or row; or hub:NAME#CONFIG:SPLIT for a dataset of the Hugging Face hub."""
    train_weights: tuple[float, ...] = ()
    """Weight of each entry of `train` in the mixture: with [3, 1], three of four prompts come from the first. An entry
    that has been read completely starts again, in a new order. An empty list: every prompt once per epoch."""
    valid: tuple[str, ...] = ()
    """Data to evaluate on, in the same forms; an empty list: no evaluation."""
    format: Literal["auto", "pair", "ranking", "hh", "steps"] = "auto"
    """Form of a line. `pair`: {"prompt", "chosen", "rejected"} with texts or lists of {"role", "content"}; without a
    prompt, the common beginning of both answers is the prompt. `ranking`: {"prompt", "responses"}, from best to worst
    or with "scores". `hh`: "chosen" and "rejected" as in Anthropic's HH-RLHF, each a whole dialogue of "Human:" and
    "Assistant:". `steps`: {"prompt", "completions", "labels"}, the steps of an answer and whether each is right, for a
    process reward model. `auto`: detected from the keys of each line (`hh` if both sides are such dialogues), but never
    `steps`."""
    prompt_field: Text = "prompt"
    """Field of a line that holds the prompt, a text or chat turns; a line may lack it."""
    messages_field: Text = "messages"
    """Field of a line that holds the prompt as turns, in lines without `prompt_field`."""
    chosen_field: Text = "chosen"
    """Field of a line that holds the better answer, a text or turns; the turns may begin with those of the prompt."""
    rejected_field: Text = "rejected"
    """Field of a line that holds the worse answer, in the same form."""
    responses_field: Text = "responses"
    """Field of a line that holds the list of answers of a ranking; every two of them make a pair."""
    scores_field: Text = "scores"
    """Field of a line that holds a score per answer of a ranking; higher is better, and equal scores are a tie. The
    answers of a line without it are ranked from best to worst."""
    steps_field: Text = "completions"
    """With format="steps", field of a line that holds the steps of an answer, a list of texts."""
    labels_field: Text = "labels"
    """Field of a line that holds a label per step: true, false, the probability that it is right, or null (not trained
    on)."""
    step_separator: Text = "\n"
    """Text between two steps of an answer. A step ends after it; the last step ends with the answer."""
    tie_field: Text = "tie"
    """Field of a line that is true if neither answer is better."""
    margin_field: Text | None = "margin"
    """Field of a line that holds the margin, a number, by which the chosen answer is better; "scores": in a ranking,
    the difference of the pair's scores. `none`, and in lines without it: 0."""
    ties: Literal["train", "skip"] = "train"
    """Treatment of ties. `train`: a tie counts half as a win of either side. `skip`: it is left out and counted."""
    prompt_template: Text | None = None
    """Template of the prompt, such as "Question: {question}": {name} stands for a field of the line, {{name}} for the
    text {name}; `none`: the prompt is `prompt_field`."""
    max_bad: NonNegativeInt | None = 0
    """Maximum number of invalid lines: each is left out, counted, and logged with file and line. With more, the run
    ends before it starts. `none`: any number."""
    chat_template: str = "tokenizer"
    """Template that renders prompt and answer as text; use that of the fine-tuning. `tokenizer`: the tokenizer's own.
    `plain`: "role:" above each turn. `raw`: the turns end to end with nothing between. Anything else: a file with a
    jinja template."""
    seq_length: PositiveInt = 1024
    """Maximum number of tokens of a prompt with one of its answers."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of a prompt that exceeds `seq_length` with one answer, or a microbatch with all compared answers.
    `error`: the run ends before it starts. `skip`: the prompt is left out and counted."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Number of positions of a forward pass, which holds whole pairs; `auto`: twice `seq_length`."""
    tokenizer: TokenizerConfig = TokenizerConfig()

    @cached_property
    def has_steps(self) -> bool:
        """Whether the data consists of answers with labelled steps instead of pairs."""
        return self.format == "steps"


class PreferenceRunConfig(RunConfig):
    """A training on preferences. `train.global_batch` counts pairs, or answers with labelled steps. A batch is a few
    pairs larger if its last prompt has several.
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
    """Loss on pairs of answers. The reward of an answer is beta x (its logprob - the reference's)."""

    loss: DPOKind = "sigmoid"
    """Loss of a pair. `sigmoid`: DPO (arXiv 2305.18290), or cDPO with `label_smoothing`. `robust`: DPO, corrected for
    flipped labels (arXiv 2403.00409). `ipo`: squared distance to 1 / (2 beta) (arXiv 2310.12036). `hinge`: the hinge
    loss of RSO (arXiv 2309.06657). `simpo`: mean logprobs, without a reference (arXiv 2405.14734). `orpo`: odds ratio
    and cross entropy, without a reference (arXiv 2403.07691)."""
    beta: PositiveFloat = 0.1
    """Factor on the rewards: the larger, the closer the policy stays to the reference. For orpo, the weight of the odds
    ratio. SimPO's paper uses 2.0 to 2.5, ORPO's 0.1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the answers of a pair are swapped in the data; 0: the data are trusted."""
    length_normalised: bool | Literal["auto"] = "auto"
    """Divide an answer's logprob by its number of tokens; `auto`: for simpo and orpo."""
    target_margin: NonNegativeFloat = 0.0
    """Margin by which the chosen answer's reward should exceed the rejected one's: SimPO's gamma, 0.3 to 1.6."""
    margin_coeff: NonNegativeFloat = 0.0
    """Factor on the margin of a pair in the data (data.margin_field), which is added to `target_margin` as in ODPO
    (arXiv 2402.10571); 0: these margins are ignored."""
    nll_coeff: NonNegativeFloat | Literal["auto"] = "auto"
    """Weight of the chosen answer's cross entropy per token, which keeps its logprob from falling (arXiv 2404.19733);
    0: off; `auto`: 1 for orpo, else 0."""
    reference: Text | None = None
    """Checkpoint of the reference; `none`: the weights that the run starts from."""
    reference_cache: Text | Literal["auto"] = "auto"
    """Folder for the reference's logprobs; runs on the same data from the same checkpoint can share it. `auto`:
    `<run_dir>/reference_logprobs`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens with fp32 logits at a time, unless logits come in chunks (`platform.logits_chunk_tokens`)."""

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
    """The config of `mcore-rl dpo`."""

    run_dir: str = "runs/dpo"
    dpo: DPOSection = DPOSection()


class RewardModelSection(Section):
    """Loss on pairs: -log sigmoid(chosen - rejected - margin) of the scores at the answers' last tokens (arXiv
    2203.02155). With data.format="steps", the cross entropy of each step's label with the score at the step's last
    token (arXiv 2305.20050).
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the answers of a pair are swapped in the data, or that the label of a step is wrong."""
    margin_coeff: NonNegativeFloat = 1.0
    """Factor on the margin of a pair in the data (data.margin_field) by which the chosen score should be higher (arXiv
    2307.09288); 0: these margins are ignored."""
    centering_coeff: NonNegativeFloat = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores near 0 (arXiv 2312.09244); 0: off. TRL calls it
    center_rewards_coefficient; 0.01 is usual."""
    shift: Literal["auto", "chosen", "none"] = "auto"
    """Number that is subtracted from all scores after the last step; it changes no comparison. `chosen`: the mean score
    of the chosen answers of the evaluation (without an evaluation, of as many training pairs), which then average 0
    (arXiv 2203.02155). `none`: nothing. `auto`: `chosen` with pairs, `none` with steps, whose scores are logits."""


class RewardModelConfig(PreferenceRunConfig):
    """The config of `mcore-rl rm`."""

    run_dir: str = "runs/rm"
    rm: RewardModelSection = RewardModelSection()
    trains_scores: ClassVar[bool] = True
    """Always true: the model has a scalar head."""

    @cached_property
    def shifts_scores(self) -> bool:
        """Whether a number is subtracted from all scores after the last step."""
        return self.rm.shift == "chosen" or (self.rm.shift == "auto" and not self.data.has_steps)
