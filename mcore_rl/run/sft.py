"""One rank of a fine-tuning run: `mcore-rl sft`, or `torchrun ... -m mcore_rl.run.sft CONFIG.toml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.launcher import world_size_of_launcher
from mcore_rl.backend.processes import rank_guard
from mcore_rl.checks.sft import check_sft
from mcore_rl.config.load import load_config
from mcore_rl.config.sft import SFTConfig
from mcore_rl.data.chat import load_chat
from mcore_rl.data.examples import Examples, read_examples
from mcore_rl.data.packed_sequences import PackedSequences, PackingOptions
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.obs.metrics import Metric
from mcore_rl.run.trained import refuse_other_tokenizer
from mcore_rl.run.training import Data, batches, fitting, train
from mcore_rl.train.batch_size import total_samples
from mcore_rl.train.loop import Sources
from mcore_rl.train.state import TrainState


def main(argv: Sequence[str]) -> int:
    """Train as the config file and overrides in `argv` say: 0 when all is done or the run was asked to stop."""
    with rank_guard():
        config = load_config(SFTConfig, Path(argv[0]), argv[1:])
        check_sft(config, world_size_of_launcher())
        data = data_of(config)
        platform = platforms.start(config.platform)
        train(config, data, platform)
        platforms.stop()
    return 0


def data_of(config: SFTConfig) -> Data:
    """The conversations that `config` names, encoded and packed."""
    data, train_settings = config.data, config.train
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer {data.tokenizer.path} has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{config.model.vocab_size}. Name the tokenizer that the model was trained with."
        )
    refuse_other_tokenizer(tokenizer, config.checkpoint.load)
    chat = load_chat(data.chat_template, tokenizer, data.tokenizer.path)
    packing = packing_of(config, tokenizer)
    examples = read_examples(data.train, data, chat)
    train_rows = PackedSequences(examples, packing, total_samples(train_settings))
    valid_rows = None
    if data.valid and train_settings.eval_batches:
        held_out = read_examples(data.valid, data, chat)
        valid_rows = PackedSequences(
            held_out, packing, train_settings.eval_batches * train_settings.global_batch
        )

    def sources(state: TrainState, _: object) -> Sources:
        return Sources(
            train=batches(state, train_rows),
            seq_length=train_rows.mean_length,
            valid=None if valid_rows is None else batches(state, valid_rows),
        )

    return Data(
        begin=fitting(sources), facts=lambda: facts_of(train_rows), lines=(told(examples, train_rows),)
    )


def packing_of(config: SFTConfig, tokenizer: Tokenizer) -> PackingOptions:
    """How rows are made for this mesh."""
    return PackingOptions(
        row_length=config.data.seq_length,
        length_multiple=config.span_multiple,
        buffer=config.data.pack_buffer,
        seed=config.train.seed,
        pad_id=tokenizer.eod_id,
    )


def facts_of(rows: PackedSequences) -> list[Metric]:
    """What the log says of the training data."""
    examples = rows.examples
    return [
        Metric("data/examples", len(examples)),
        Metric("data/skipped_examples", examples.num_skipped),
        Metric("data/filled_fraction", rows.filled_fraction),
    ]


def told(examples: Examples, rows: PackedSequences) -> str:
    """The same in a sentence."""
    skipped = (
        f"; {examples.num_skipped} were longer than a row and are left out" if examples.num_skipped else ""
    )
    return (
        f"{len(examples)} conversations in {rows.sequences_per_epoch} rows of {rows.packing.row_length}, "
        f"{rows.filled_fraction:.1%} filled, {examples.assistant_fraction:.1%} of the tokens trained on{skipped}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
