"""The section `rl.prompts`: where prompts come from."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Section, Text


class PromptConfig(Section):
    """Prompts and their reference answers."""

    task: (
        Literal["file", "arithmetic", "sorting", "copying", "reversing", "countdown", "seeds"] | Extension
    ) = "file"
    """Source of prompts; `file`: read `files`; `arithmetic`, `sorting`, `copying`, `reversing`, `countdown`: problems
    without end, each determined by the seed and its index; `seeds`: numbers, from which rl.environment makes its own
    problems; `module:name`: problems without end, from a function of your own (random generator, size ->
    rl.tasks.TaskProblem)."""
    files: tuple[str, ...] = ()
    """JSON lines (also compressed), .parquet, folders, or datasets of the Hugging Face hub as hub:NAME#CONFIG:SPLIT,
    with a prompt and an answer; all other fields of a line are passed to the reward functions."""
    file_weights: tuple[float, ...] = ()
    """Weight of each of `files` in the mixture, in prompts: with [3, 1], three of four prompts are from the first. A
    file that has been read starts again in a new order. An empty list: every prompt once per epoch."""
    prompt_field: str = "prompt"
    """The field with the prompt: text, or a list of {"role", "content"}. A prompt that ends in a turn of the assistant
    has the beginning of the answer, which continues from there, and is not scored."""
    prompt_template: Text | None = None
    """Template of the prompt, in which {name} is a field of the line ({{name}} is the text {name}), such as "{question}
    Put the answer in \\boxed{}."; `none`: the prompt is `prompt_field`."""
    answer_field: str = "answer"
    """The field with the reference answer; a line may lack it if no reward needs it."""
    max_bad: NonNegativeInt | None = 0
    """Number of lines of files that may be invalid: they are left out, counted, and logged with file and line. With
    more, the run ends before it starts; `none`: any number. Training and evaluation count separately."""
    smallest: PositiveInt = 2
    """Minimum number of digits, letters or numbers of a problem of a built-in task."""
    largest: PositiveInt = 4
    """Maximum number of digits, letters or numbers of a problem of a built-in task."""
    max_tokens: PositiveInt = 1024
    """Maximum length of a prompt in tokens; a longer prompt of a file is left out and counted, a longer prompt of a
    built-in task ends the run."""
