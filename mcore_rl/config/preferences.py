"""The data of trainings on preferences: reward models, DPO and its family."""

from functools import cached_property
from math import lcm
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section, Text


class PreferenceDataConfig(Section):
    """Preferences between answers to a prompt, shuffled by train.seed. All answers to a prompt that are compared with
    each other are packed into one microbatch, in which none sees another.
    """

    train: tuple[str, ...] = ()
    """Data to train on: files of JSON lines (also .gz) or .parquet, one comparison per line or row, or datasets of the
    Hugging Face hub as hub:NAME#CONFIG:SPLIT."""
    train_weights: tuple[float, ...] = ()
    """Weight of each entry of `train` in the mixture, in prompts: with [3, 1] three of four are from the first, and
    each entry begins anew, in another order, when it has been read; an empty list: every prompt once an epoch."""
    valid: tuple[str, ...] = ()
    """Data to evaluate on, in the same forms; an empty list: no evaluation."""
    format: Literal["auto", "pair", "ranking", "hh", "steps"] = "auto"
    """Form of a line; `pair`: {"prompt", "chosen", "rejected"} with texts or lists of {"role", "content"}, where the
    prompt may be left out: it is then what both sides begin with; `ranking`: {"prompt", "responses"}, each response
    before the ones that are worse, or with "scores"; `hh`: "chosen" and "rejected" as in Anthropic's HH-RLHF, each a
    whole dialogue of "Human:" and "Assistant:"; `steps`: {"prompt", "completions", "labels"}, the steps of one answer
    and whether each is right, for a process reward model; `auto`: by the keys of each line, and `hh` where both sides
    begin so, but never `steps`."""
    prompt_field: Text = "prompt"
    """Field of a line with the prompt, a text or the turns of a chat; a line may lack it."""
    messages_field: Text = "messages"
    """Field of a line with the prompt as turns, for lines without `prompt_field`."""
    chosen_field: Text = "chosen"
    """Field of a line with the better answer, a text or turns; turns may begin with those of the prompt."""
    rejected_field: Text = "rejected"
    """Field of a line with the worse answer, in the form of the better one."""
    responses_field: Text = "responses"
    """Field of a line with the answers of a ranking, a list; every two of them make a pair."""
    scores_field: Text = "scores"
    """Field of a line with a score for each answer of a ranking, higher is better; a line without it ranks its answers
    from best to worst. Equal scores are a tie."""
    steps_field: Text = "completions"
    """Field of a line with the steps of an answer, a list of texts, with format="steps"."""
    labels_field: Text = "labels"
    """Field of a line with a label for each step: true or false, the probability that it is right, or null, with which
    the step is not trained on."""
    step_separator: Text = "\n"
    """Text between two steps of an answer. A step ends after it, and the last one with the answer."""
    tie_field: Text = "tie"
    """Field of a line that is true where neither answer is better."""
    margin_field: Text | None = "margin"
    """Field of a line with the margin by which the better answer is better, a number; `none`, and a line without it: 0.
    Where it is "scores", the margin of a ranking's pair is the difference of their scores."""
    ties: Literal["train", "skip"] = "train"
    """`train`: a tie counts half as a win of either side; `skip`: it is left out and counted."""
    prompt_template: Text | None = None
    """Text of the prompt in which {name} is a field of the line ({{name}} is the text {name}), as "Question:
    {question}"; `none`: the prompt is `prompt_field`."""
    max_bad: NonNegativeInt | None = 0
    """Lines that may be no comparison: they are left out, counted, and logged with file and line; more end the run
    before it starts; `none`: any number."""
    chat_template: str = "tokenizer"
    """Template that makes text of prompt and answer; `tokenizer`: the one in the tokenizer's folder; `plain`: "role:"
    above each turn; `raw`: the turns end to end with nothing between; anything else: a file with a jinja template. The
    same as in fine-tuning."""
    seq_length: PositiveInt = 1024
    """Tokens of the longest prompt with one answer."""
    too_long: Literal["error", "skip"] = "error"
    """A prompt with an answer longer than `seq_length`, or whose compared answers together are longer than a
    microbatch, ends the run before it starts, or is left out and counted."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Positions of one forward pass, into which whole pairs are packed; `auto`: two of `seq_length`."""
    tokenizer: TokenizerConfig = TokenizerConfig()

    @cached_property
    def has_steps(self) -> bool:
        """Whether the data is answers with labelled steps, and no pairs."""
        return self.format == "steps"


class PreferenceRunConfig(RunConfig):
    """A training on preferences: `train.global_batch` counts pairs, or answers with labelled steps; a batch is a few
    pairs larger where the answers to its last prompt make more than one.
    """

    data: PreferenceDataConfig = PreferenceDataConfig()

    @cached_property
    def packed_multiple(self) -> int:
        """Multiple of positions of a packed sequence, so that context and sequence parallelism can cut it, and products
        in 8 bits take what they leave.
        """
        slices = self.mesh.cp * (self.mesh.tp if self.mesh.sequence_parallel else 1)
        return lcm(self.mesh.zigzag, slices * self.platform.fp8_multiple)

    @cached_property
    def packed_length(self) -> int:
        """Largest number of positions of one forward pass."""
        wanted = self.data.tokens_per_microbatch
        if wanted == "auto":
            longest = -(-self.data.seq_length // self.mesh.zigzag) * self.mesh.zigzag
            wanted = 2 * longest
        return -(-wanted // self.packed_multiple) * self.packed_multiple
