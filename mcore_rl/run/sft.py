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
from mcore_rl.data.examples import SHOWN, read_examples
from mcore_rl.data.packed_sequences import PackedSequences, PackingOptions
from mcore_rl.obs.metrics import Metric
from mcore_rl.run.open_run import is_done, open_run
from mcore_rl.run.trained_model import load_matching_tokenizer
from mcore_rl.train.batch_size import total_samples
from mcore_rl.train.loop import SupervisedTrainer
from mcore_rl.train.objectives import NextTokenHead


def main(argv: Sequence[str]) -> int:
    """Fine-tune on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    with rank_guard():
        train(load_config(SFTConfig, Path(argv[0]), argv[1:]))
    return 0


def train(config: SFTConfig) -> None:
    """Collective over the ranks that a launcher started: fine-tune to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    check_sft(config, world_size_of_launcher())
    tokenizer = load_matching_tokenizer(config.data.tokenizer, config.model, config.checkpoint.load)
    chat = load_chat(config.data.chat_template, tokenizer, config.data.tokenizer.path)
    packing = PackingOptions(
        row_length=config.data.seq_length,
        length_multiple=config.span_multiple,
        buffer=config.data.pack_buffer,
        seed=config.train.seed,
        pad_id=tokenizer.eod_id,
    )
    examples = read_examples(config.data.train, config.data, chat)
    packed = PackedSequences(examples, packing, total_samples(config.train))
    packed_valid = None
    if config.data.valid and config.train.eval_batches:
        num_evaluated = config.train.eval_batches * config.train.global_batch
        packed_valid = PackedSequences(
            read_examples(config.data.valid, config.data, chat), packing, num_evaluated
        )
    platform = platforms.start(config.platform)
    if not is_done(config, platform):
        with open_run(config, platform) as run:
            run.log.message(describe_data(packed))
            run.log.write_now(
                run.state.progress.step,
                [
                    Metric("data/examples", len(examples)),
                    Metric("data/skipped_examples", examples.num_skipped),
                    Metric("data/filled_fraction", packed.filled_fraction),
                ],
            )
            SupervisedTrainer(
                run, NextTokenHead(), train=packed, valid=packed_valid, seq_length=packed.mean_length
            ).run()
    platforms.stop()


def describe_data(packed: PackedSequences) -> str:
    """Return one line for the log: conversations, packed sequences, trained tokens, what was left out."""
    examples = packed.examples
    skipped = f"; {examples.num_skipped} were too long and are left out" if examples.num_skipped else ""
    if examples.bad_lines:
        shown = "; ".join(examples.bad_lines[:SHOWN])
        skipped += f"; {len(examples.bad_lines)} bad lines are left out: {shown}"
    return (
        f"{len(examples)} conversations in {packed.sequences_per_epoch} packed sequences of "
        f"{packed.packing.row_length}, {packed.filled_fraction:.1%} filled, "
        f"{examples.assistant_fraction:.1%} of the tokens trained on{skipped}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
