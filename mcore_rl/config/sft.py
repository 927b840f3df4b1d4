"""What a supervised fine-tuning run does."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section


class SFTDataConfig(Section):
    """Conversations as JSON lines, packed into rows without seeing each other; shuffled by train.seed."""

    train: tuple[str, ...] = ()
    """Files to train on, one conversation a line."""
    valid: tuple[str, ...] = ()
    """Files to evaluate on; empty: no evaluation."""
    format: Literal["auto", "chat", "prompt_response"] = "auto"
    """`chat`: {"messages": [{"role", "content"}, ...]}; `prompt_response`: {"prompt", "response"}, a chat of two
    turns; `auto`: by the keys of each line."""
    chat_template: str = "tokenizer"
    """`tokenizer`: the one in the tokenizer's folder; `plain`: "role:" above each turn; `raw`: the turns end to end
    with nothing between; anything else: a file with a jinja template."""
    seq_length: PositiveInt = 1024
    """Tokens of a row, into which whole conversations are packed."""
    too_long: Literal["error", "skip"] = "error"
    """A conversation that no row holds ends the run before it starts, or is left out and counted."""
    pack_buffer: PositiveInt = 1024
    """Conversations that are packed at a time: more leave fewer gaps, fewer mix better."""
    span_multiple: NonNegativeInt = 0
    """Conversations are padded to a multiple of so many tokens; 0: what mesh.cp needs (2 * cp, or 1 without it). Only
    with the same number are the rows the same on meshes of different cp."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class SFTConfig(RunConfig):
    """`mcore-rl sft`."""

    run_dir: str = "runs/sft"
    """Folder of everything that the run writes; one run, one folder, one writer."""
    data: SFTDataConfig = SFTDataConfig()

    @property
    def span_multiple(self) -> int:
        """What conversations are padded to in fact."""
        return self.data.span_multiple or self.mesh.zigzag
