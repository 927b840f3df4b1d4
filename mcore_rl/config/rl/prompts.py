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
    """The field with the prompt: text, or a list of {"role", "content"}; one that ends in a turn of the assistant has
    the beginning of the answer, which goes on from there, and is not scored."""
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
