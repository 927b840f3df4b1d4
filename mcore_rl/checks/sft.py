"""Checks that the settings of a fine-tuning run are compatible."""

from mcore_rl.checks.run import batch_violations, chat_violations, refuse, run_violations, weight_violations
from mcore_rl.config.sft import SFTConfig


def check_sft(config: SFTConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    data = config.data
    no_data = 'data.train is empty. Name files of JSON lines with "messages", or "prompt" and "response".'
    refuse(
        [
            *run_violations(config, world_size, data.seq_length, "data.seq_length"),
            *batch_violations(config.train, config.mesh, world_size),
            *([] if data.train else [no_data]),
            *weight_violations("data.train_weights", data.train_weights, "data.train", data.train),
            *chat_violations(data.tokenizer, data.chat_template, "conversations"),
        ]
    )
