"""One rank of a fine-tuning run: `mcore-rl sft`, or `torchrun ... -m mcore_rl.programs.sft CONFIG.toml`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.checks.tuning import check_sft
from mcore_rl.config.sft import SFTConfig
from mcore_rl.data.answer_ends import end_tokens, no_end_warning
from mcore_rl.data.chat import load_chat
from mcore_rl.data.examples import read_examples
from mcore_rl.data.packing import PackedSequences, PackingOptions, refuse_empty_sources
from mcore_rl.data.records import SHOWN, shapes_among, warnings_among
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.families import allows_te
from mcore_rl.megatron import platform as platforms
from mcore_rl.metrics.metrics import Metric
from mcore_rl.programs.inputs import load_matching_tokenizer
from mcore_rl.programs.open_run import is_done, open_run, run_rank
from mcore_rl.train.loop import SupervisedTrainer, total_samples
from mcore_rl.train.step import NextTokenHead
from mcore_rl.workers.launcher import world_size_of_launcher


def main(argv: Sequence[str]) -> int:
    """Fine-tune on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    return run_rank(train, SFTConfig, argv)


def train(config: SFTConfig) -> None:
    """Collective over the ranks that a launcher started: fine-tune to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    config = platforms.decided(config)
    check_sft(config, world_size_of_launcher())
    tokenizer = load_matching_tokenizer(config.data.tokenizer, config.model, config.checkpoint.load)
    packed = packed_train(config, tokenizer)
    packed_valid = packed_for_evaluation(config, tokenizer)
    examples, path = packed.examples, config.data.tokenizer.path
    ends = end_tokens(tokenizer, load_chat(config.data.chat_template, tokenizer, path), path)
    no_end = no_end_warning(examples, ends, tokenizer)
    platform = platforms.start(config.platform, allows_te=allows_te(config))
    if not is_done(config, platform):
        with open_run(config, platform) as run:
            for line in [*describe_data(packed), *([no_end] if no_end else [])]:
                run.log.message(line)
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


def packed_train(config: SFTConfig, tokenizer: Tokenizer) -> PackedSequences:
    """Return the training conversations, packed. Raises DataError if there are none, or none from a weighted file."""
    data = config.data
    chat = load_chat(data.chat_template, tokenizer, data.tokenizer.path)
    examples = read_examples(data.train, data, chat)
    refuse_empty_sources("data.train_weights", data.train_weights, data.train, examples.source_sizes)
    packing = replace(packing_of(config, tokenizer), weights=data.train_weights)
    return PackedSequences(examples, packing, total_samples(config.train))


def packed_for_evaluation(config: SFTConfig, tokenizer: Tokenizer) -> PackedSequences | None:
    """Return the conversations of data.valid, packed; None without evaluations."""
    data = config.data
    if not data.valid or not config.train.eval_batches:
        return None
    chat = load_chat(data.chat_template, tokenizer, data.tokenizer.path)
    examples = read_examples(data.valid, data, chat)
    num_sequences = config.train.eval_batches * config.train.global_batch
    return PackedSequences(examples, packing_of(config, tokenizer), num_sequences)


def packing_of(config: SFTConfig, tokenizer: Tokenizer) -> PackingOptions:
    """Return the settings of packing, without a mixture."""
    return PackingOptions(
        row_length=config.data.seq_length,
        length_multiple=config.mesh.zigzag,
        buffer=config.data.pack_buffer,
        seed=config.train.seed,
        pad_id=tokenizer.eod_id,
    )


def describe_data(packed: PackedSequences) -> list[str]:
    """Return log lines: conversations, packed sequences, trained tokens and omissions, then warnings."""
    examples = packed.examples
    skipped = f"; {examples.num_skipped} were too long and are left out" if examples.num_skipped else ""
    if examples.bad_lines:
        shown = "; ".join(examples.bad_lines[:SHOWN])
        skipped += f"; {len(examples.bad_lines)} bad lines are left out: {shown}"
    weights = list(packed.packing.weights)
    mixed = f", mixed by data.train_weights={weights}," if weights else ""
    line = (
        f"{len(examples)} conversations{mixed} in {packed.sequences_per_epoch} packed sequences of "
        f"{packed.packing.row_length}, {packed.filled_fraction:.1%} filled, "
        f"{examples.assistant_fraction:.1%} of the tokens trained on{skipped}" + shapes_among(examples.notes)
    )
    return [line, *warnings_among(examples.notes)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
