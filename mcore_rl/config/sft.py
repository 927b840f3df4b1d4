"""The config of a supervised fine-tuning run."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import correct_part
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section, Text


def evaluation_conditions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of the evaluations of an RL config: "prompts" (files, or task, sizes and seed), "first"
    (their number), "samples" a prompt, "temperature", "max_new_tokens", "correct_by" (part of the reward),
    "environment" and "agent" if any.
    """
    rl = config.get("rl", {})
    prompts, evaluation = rl.get("prompts", {}), rl.get("eval", {})
    task = prompts.get("task", "file")
    if task == "file":
        source = ", ".join(evaluation.get("files", ()))
    else:
        sizes = f"{prompts.get('smallest')} to {prompts.get('largest')}"
        source = f"{task} {sizes}, seed {config.get('train', {}).get('seed')}"
    reward = rl.get("reward", {})
    correct = reward.get("correct", "auto")
    environment = rl.get("environment", {})
    limits = ("name", "arguments", "max_turns", "max_tokens")
    agent = rl.get("agent", {})
    of_agent = ("function", "command", "arguments", "max_calls", "max_tokens", "branches")
    return {
        "prompts": source,
        "first": evaluation.get("num_prompts"),
        "samples": evaluation.get("samples"),
        "temperature": evaluation.get("temperature"),
        "max_new_tokens": rl.get("rollout", {}).get("max_new_tokens"),
        "correct_by": correct_part(None if correct == "none" else correct, reward.get("parts", ())),
        **({"environment": {key: environment[key] for key in limits}} if environment.get("name") else {}),
        **(
            {"agent": {key: agent.get(key) for key in of_agent}}
            if agent.get("command") or agent.get("function", "none") not in (None, "none")
            else {}
        ),
    }


class SFTDataConfig(Section):
    """Conversations as JSON lines, shuffled by train.seed. They are packed into sequences, in which they do not attend
    to each other.
    """

    train: tuple[str, ...] = ()
    """Data to train on: JSON lines, a JSON list or CSV (also .gz, .bz2, .xz, .zst), .parquet, or folders of such files,
    with one conversation per line, entry or row; or hub:NAME#CONFIG:SPLIT for a dataset of the Hugging Face hub."""
    train_weights: tuple[float, ...] = ()
    """Weight of each entry of `train` in the mixture: with [3, 1], three of four conversations come from the first. An
    entry that has been read completely starts again, in a new order. An empty list: every conversation once per
    epoch."""
    valid: tuple[str, ...] = ()
    """Data to evaluate on, in the same forms; an empty list: no evaluation."""
    format: Literal["auto", "chat", "prompt_response"] = "auto"
    """Form of a line. `chat`: {"messages": [{"role", "content"}, ...]}. `prompt_response`: {"prompt", "response"}, a
    chat of two turns. `auto`: detected from the keys of each line, including those of ShareGPT, TRL, alpaca, dolly, and
    question and answer."""
    messages_field: Text = "messages"
    """Field of a line that holds the turns of a chat: a list of {"role", "content"}."""
    prompt_field: Text = "prompt"
    """Field of a line that holds the prompt, in lines of prompt and response."""
    response_field: Text = "response"
    """Field of a line that holds the response."""
    prompt_template: Text | None = None
    """Template of the prompt, such as "Question: {question}": {name} stands for a field of the line, {{name}} for the
    text {name}; `none`: the prompt is `prompt_field`."""
    max_bad: NonNegativeInt | None = 0
    """Maximum number of invalid lines: each is left out, counted, and logged with file and line. With more, the run
    ends before it starts. `none`: any number."""
    chat_template: str = "tokenizer"
    """Template that renders a conversation as text. `tokenizer`: the tokenizer's own. `plain`: "role:" above each turn.
    `raw`: the turns end to end with nothing between. Anything else: a file with a jinja template."""
    seq_length: PositiveInt = 1024
    """Tokens per packed sequence, which holds whole conversations."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of a conversation longer than `seq_length`. `error`: the run ends before it starts. `skip`: the
    conversation is left out and counted."""
    pack_buffer: PositiveInt = 1024
    """Number of conversations packed at a time: more of them leave fewer gaps, fewer of them mix better."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class SFTConfig(RunConfig):
    """The config of `mcore-rl sft`."""

    run_dir: str = "runs/sft"
    data: SFTDataConfig = SFTDataConfig()

    @cached_property
    def packed_length(self) -> int:
        """Number of positions of a packed sequence."""
        return self.data.seq_length
