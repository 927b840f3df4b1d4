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
    """Conversations as JSON lines, shuffled by train.seed and packed into sequences, where they do not attend to each
    other.
    """

    train: tuple[str, ...] = ()
    """Data to train on: JSON lines, a JSON list or CSV (also .gz, .bz2, .xz, .zst), .parquet, or folders of
    them, one conversation per line, entry or row, or datasets of the Hugging Face hub as hub:NAME#CONFIG:SPLIT."""
    train_weights: tuple[float, ...] = ()
    """Weight of each entry of `train` in the mixture, in conversations: with [3, 1], three of four conversations are
    from the first. An entry that has been read starts again in a new order. An empty list: every conversation once per
    epoch."""
    valid: tuple[str, ...] = ()
    """Data to evaluate on, in the same forms; an empty list: no evaluation."""
    format: Literal["auto", "chat", "prompt_response"] = "auto"
    """Form of a line; `chat`: {"messages": [{"role", "content"}, ...]}; `prompt_response`: {"prompt", "response"}, a
    chat of two turns; `auto`: by the keys of each line, which may also be the keys of ShareGPT, TRL, alpaca or dolly,
    or question and answer."""
    messages_field: Text = "messages"
    """Field of a line with the turns of a chat, a list of {"role", "content"}."""
    prompt_field: Text = "prompt"
    """Field of a line with the prompt, in lines of prompt and response."""
    response_field: Text = "response"
    """Field of a line with the response."""
    prompt_template: Text | None = None
    """Template of the prompt, in which {name} is a field of the line ({{name}} is the text {name}), such as "Question:
    {question}"; `none`: the prompt is `prompt_field`."""
    max_bad: NonNegativeInt | None = 0
    """Number of lines that may be invalid: they are left out, counted, and logged with file and line. With more, the
    run ends before it starts; `none`: any number."""
    chat_template: str = "tokenizer"
    """Template that renders a conversation as text; `tokenizer`: the template in the tokenizer's folder; `plain`:
    "role:" above each turn; `raw`: the turns end to end with nothing between; anything else: a file with a jinja
    template."""
    seq_length: PositiveInt = 1024
    """Tokens per packed sequence, into which whole conversations are packed."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of a conversation longer than `seq_length`; `error`: the run ends before it starts; `skip`: the
    conversation is left out and counted."""
    pack_buffer: PositiveInt = 1024
    """Number of conversations that are packed at a time: more leave fewer gaps, fewer mix better."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class SFTConfig(RunConfig):
    """`mcore-rl sft`."""

    run_dir: str = "runs/sft"
    data: SFTDataConfig = SFTDataConfig()

    @cached_property
    def packed_length(self) -> int:
        """Number of positions of a packed sequence."""
        return self.data.seq_length
