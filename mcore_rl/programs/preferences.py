"""The program of both trainings on preferences, DPO and reward models: its data, read and described, and its run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy

from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.data.chat import load_chat
from mcore_rl.data.packing import refuse_empty_sources
from mcore_rl.data.preferences import Preferences, read_preferences
from mcore_rl.data.records import SHOWN, shapes_among, warnings_among
from mcore_rl.families import allows_te
from mcore_rl.megatron import platform as platforms
from mcore_rl.metrics.metrics import Metric
from mcore_rl.programs.inputs import load_matching_tokenizer
from mcore_rl.programs.open_run import is_done, open_run
from mcore_rl.train.loop import Run
from mcore_rl.train.preferences import PreferenceSource, PreferenceTrainer, packing_limits
from mcore_rl.workers.launcher import world_size_of_launcher

C = TypeVar("C", bound=PreferenceRunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceData:
    """Preferences for training and for evaluations."""

    train: PreferenceSource
    valid: PreferenceSource | None
    """None without evaluations."""


def train_on_preferences(
    config: C, check: Callable[[C, int], None], trainer: Callable[[C, Run, PreferenceData], PreferenceTrainer]
) -> None:
    """Collective over the ranks that a launcher started: train to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    config = platforms.decided(config)
    check(config, world_size_of_launcher())
    data = load_preferences(config)
    platform = platforms.start(config.platform, allows_te=allows_te(config))
    if not is_done(config, platform):
        with open_run(config, platform) as run:
            for line in describe_preferences(data):
                run.log.message(line)
            pairs = data.train.preferences
            metrics = [Metric("data/pairs", pairs.num_pairs), Metric("data/skipped_examples", pairs.num_skipped)]
            run.log.write_now(run.state.progress.step, metrics)
            trainer(config, run, data).run()
    platforms.stop()


def load_preferences(config: PreferenceRunConfig) -> PreferenceData:
    """Read data.train and data.valid. Raises DataError for unusable lines, or a different tokenizer."""
    data = config.data
    tokenizer = load_matching_tokenizer(data.tokenizer, config.model, config.checkpoint.load)
    chat = load_chat(data.chat_template, tokenizer, data.tokenizer.path)

    def read(paths: tuple[str, ...]) -> Preferences:
        return read_preferences(
            paths, data, chat, packed_length=config.packed_length, length_multiple=config.mesh.zigzag
        )

    train = read(data.train)
    refuse_empty_sources("data.train_weights", data.train_weights, data.train, train.source_sizes)
    has_valid = bool(data.valid and config.train.eval_batches)
    source = partial(PreferenceSource, limits=packing_limits(config), seed=config.train.seed, pad_id=tokenizer.eod_id)
    return PreferenceData(
        train=source(train, weights=data.train_weights), valid=source(read(data.valid)) if has_valid else None
    )


def describe_preferences(data: PreferenceData) -> list[str]:
    """Return log lines: prompts, pairs and omissions, then warnings."""
    train = data.train.preferences
    text = _describe(train)
    if data.valid is not None:
        text += f"; {_describe(data.valid.preferences)} to evaluate on"
    if train.num_skipped:
        text += f"; {train.num_skipped} prompts were too long and are left out"
    if train.num_skipped_ties:
        text += f"; {train.num_skipped_ties} ties are left out"
    if train.bad_lines:
        text += f"; {len(train.bad_lines)} bad lines are left out: {'; '.join(train.bad_lines[:SHOWN])}"
    return [text + shapes_among(train.notes), *warnings_among(train.notes)]


def _describe(preferences: Preferences) -> str:
    if preferences.labels_T is None:
        return f"{preferences.num_pairs} pairs of answers to {len(preferences)} prompts"
    num_steps = int((~numpy.isnan(preferences.labels_T)).sum())
    return f"{len(preferences)} answers with {num_steps} labelled steps"
