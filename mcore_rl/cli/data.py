"""`mcore-rl data`: train a tokenizer, encode text files for pretraining, show training examples."""

import argparse
import json
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, groupby, islice
from pathlib import Path

import numpy
from rich.console import Console

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.kinds import READERS
from mcore_rl.config.load import kind_of
from mcore_rl.config.preferences import PreferenceDataConfig, PreferenceRunConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig, SFTDataConfig
from mcore_rl.data.answer_ends import token_name
from mcore_rl.data.chat import Message
from mcore_rl.data.documents import DocumentFormat, find_input_files, format_of_endings
from mcore_rl.data.examples import conversation_of
from mcore_rl.data.megatron.indexed import NO_TOKEN, build_datasets
from mcore_rl.data.megatron.preprocess import PreprocessOptions, preprocess
from mcore_rl.data.preferences import TIE, comparison_of
from mcore_rl.data.records import is_table, read_records
from mcore_rl.data.shapes import unread_keys
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer
from mcore_rl.errors import INTERRUPTED_STATUS, ConfigError, DataError, after_echo, escaped
from mcore_rl.megatron import platform as platforms
from mcore_rl.programs.inputs import load_matching_tokenizer
from mcore_rl.programs.preferences import PreferenceData, describe_preferences, load_preferences
from mcore_rl.programs.pretrain import data_plan
from mcore_rl.programs.rollouts import Prompts, load_prompts
from mcore_rl.programs.sft import describe_data, packed_train
from mcore_rl.storage.files import data_files

SHOWN_OF_STEP = 40
"""Number of characters to show before the end of a labelled step."""
TRAINED = ("⟦", "⟧")
"""Marks around tokens with a loss, if some tokens have none."""


def _document_format(args: argparse.Namespace) -> DocumentFormat:
    return DocumentFormat(kind=args.format or format_of_endings(find_input_files(args.inputs)), key=args.key)


def make_tokenizer(args: argparse.Namespace) -> int:
    """Train a tokenizer and print its file."""
    lines = train_tokenizer(
        TokenizerTraining(
            inputs=tuple(args.inputs),
            output=args.output,
            document_format=_document_format(args),
            vocab_size=args.vocab_size,
            model_type=args.model_type,
            character_coverage=args.character_coverage,
            max_bytes=args.max_mb << 20,
            threads=args.threads,
            max_bad=args.max_bad,
            overwrite=args.overwrite,
        )
    )
    Console().print(f"{args.output}: {args.vocab_size} pieces ({args.model_type}) from {lines} lines", soft_wrap=True)
    return 0


def make_dataset(args: argparse.Namespace) -> int:
    """Encode the files; returns the exit status."""
    options = PreprocessOptions(
        inputs=tuple(args.inputs),
        output=args.output,
        tokenizer=TokenizerConfig(
            kind="huggingface" if args.tokenizer.is_dir() else "sentencepiece", path=str(args.tokenizer)
        ),
        document_format=_document_format(args),
        workers=args.workers,
        max_bad=args.max_bad,
        overwrite=args.overwrite,
    )
    try:
        preprocess(options, Console())
    except KeyboardInterrupt:
        sys.stderr.write(f"{after_echo()}stopped; the same command resumes it\n")
        return INTERRUPTED_STATUS
    return 0


def show_examples(args: argparse.Namespace) -> int:
    """Print the first `args.num` training examples of the config, or records of a data file by their format."""
    path = Path(args.config)
    is_data = path.is_file() and path.suffix != ".toml"
    if is_data or is_table(args.config) or (path.is_dir() and data_files(path)):
        for line in _records(args.config, args.num):
            sys.stdout.write(escaped(f"{line}\n"))
        return 0
    kind = args.program or kind_of(path, args.overrides)
    if kind not in PROGRAMS:
        raise ConfigError(
            f"{path} is a config of {kind}, which {READERS[kind]} reads; it has no training examples. Name one of "
            f"{', '.join(PROGRAMS)}."
        )
    config, _ = PROGRAMS[kind].checked_config(path, args.overrides, None)
    for line in _lines(config, args.num):
        sys.stdout.write(escaped(f"{line}\n"))  # unchanged: a rich console would turn tabs into spaces
    return 0


def _records(name: str, count: int) -> Iterator[str]:
    records = list(islice(read_records(name), count))
    if not records:
        raise DataError(f"{name} is empty: it has no line with a record. Check the path, and how the file was written")
    for record in records:
        keys = ", ".join(record.entry or ())
        yield f"--- {record.file}:{record.line}: keys {keys}"
        try:
            if {"chosen", "rejected", "responses", "completions"} & record.fields.keys():
                comparison = comparison_of(record, PreferenceDataConfig())
                yield "preferences, for `mcore-rl rm` and `mcore-rl dpo`"
                yield from _said(comparison.prompt.messages)
                for number, answer in enumerate(comparison.answers):
                    yield f"answer {number}:"
                    yield from _said(answer)
                for chosen, rejected in comparison.pairs:
                    yield f"{chosen} is better than {rejected}"
                continue
            conversation, shape, used = conversation_of(record.fields, SFTDataConfig(chat_template="raw"))
            yield shape
            yield from _said(conversation.messages)
            if names := unread_keys(record.fields, "conversation", used, conversation.messages):
                yield f"warning: keys that are not read: {', '.join(names)}"
        except DataError as error:
            yield f"{error}."


def _said(turns: Sequence[Message]) -> Iterator[str]:
    for turn in turns:
        text = turn.get("content")
        calls = f" {json.dumps(turn['tool_calls'], ensure_ascii=False)}" if turn.get("tool_calls") else ""
        yield f"{turn['role']}: {'' if text is None else text}{calls}"


def _lines(config: RunConfig, count: int) -> Iterator[str]:
    if isinstance(config, PretrainConfig):
        return _sequences(config, count)
    if isinstance(config, SFTConfig):
        return _conversations(config, count)
    if isinstance(config, PreferenceRunConfig):
        tokenizer = load_matching_tokenizer(config.data.tokenizer, config.model, config.checkpoint.load)
        return _comparisons(load_preferences(config), tokenizer, count)
    assert isinstance(config, RlRunConfig), type(config)
    return _prompts(load_prompts(config), count)


def _sequences(config: PretrainConfig, count: int) -> Iterator[str]:
    plan = data_plan(config)
    tokenizer = load_tokenizer(config.data.tokenizer) if config.data.tokenizer.kind != "none" else None
    yield from plan.warnings
    with ExitStack() as stack:
        # Megatron's builder communicates; this process is a world of its own.
        platforms.start(PlatformConfig(layers="torch"))
        stack.callback(platforms.stop)
        folder = config.data.cache_dir
        cache_dir = Path(config.run_dir, "index_cache") if folder == "auto" else Path(folder)
        if folder == "auto" and not cache_dir.is_dir():
            # Only a run creates its folder.
            cache_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mcore_rl_index_")))
        train = build_datasets(plan, seed=config.train.seed, cache_dir=cache_dir).train
        shown = min(count, len(train))
        yield (
            f"{len(train)} sequences of {config.data.seq_length} tokens; the loss is over all of them. Documents are "
            "cut where a sequence ends"
        )
        for index in range(shown):
            ids = [token for token in train[index]["tokens"].tolist() if token != NO_TOKEN]
            ends = f", {ids.count(tokenizer.eod_id)} ends of documents" if tokenizer else ""
            yield f"\n--- sequence {index}: {len(ids)} tokens{ends}"
            yield readable(tokenizer, ids) if tokenizer else " ".join(map(str, ids))
        if tokenizer is None:
            yield '\nThese are ids: data.tokenizer.kind="none". Name the tokenizer of the data to read its text.'


def _conversations(config: SFTConfig, count: int) -> Iterator[str]:
    tokenizer = load_matching_tokenizer(config.data.tokenizer, config.model, config.checkpoint.load)
    packed = packed_train(config, tokenizer)
    examples = packed.examples
    yield from describe_data(packed)
    yield f"{TRAINED[0]}between these{TRAINED[1]} is what is trained on; no conversation is truncated"
    ends = list(accumulate(examples.source_sizes))
    members = ((sequence, member) for sequence in range(len(packed)) for member in packed.members(sequence))
    for sequence, member in islice(members, count):
        first, last = examples.starts_N[member : member + 2]
        ids = examples.ids_T[first:last].tolist()
        # The first token is no label.
        trained = [False, *examples.assistant_mask_T[first + 1 : last].tolist()]
        file = config.data.train[bisect_right(ends, member)]
        yield f"\n--- packed sequence {sequence}, {file}: {len(ids)} tokens, {sum(trained)} trained"
        yield marked(tokenizer, ids, trained)


def _comparisons(data: PreferenceData, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    preferences = data.train.preferences
    yield from describe_preferences(data)
    yield f"{TRAINED[0]}between these{TRAINED[1]} is the answer, at whose last token a reward model's score is read"
    for group in range(min(count, len(preferences))):
        first, last = preferences.sequence_starts_G[group : group + 2].tolist()
        for number, sequence in enumerate(range(first, last)):
            span = slice(*preferences.starts_N[sequence : sequence + 2].tolist())
            ids, is_answer = preferences.ids_T[span].tolist(), preferences.is_answer_T[span].tolist()
            yield f"\n--- prompt {group}, answer {number}: {len(ids)} tokens, {sum(is_answer)} of the answer"
            yield marked(tokenizer, ids, is_answer)
            if preferences.labels_T is not None:
                labels = preferences.labels_T[span]
                for token in numpy.flatnonzero(~numpy.isnan(labels)).tolist():
                    text = readable(tokenizer, ids[: token + 1])
                    yield f"right with probability {labels[token]:g} up to: …{text[-SHOWN_OF_STEP:]!r}"
        if preferences.labels_T is not None:
            continue
        pairs = range(*preferences.pair_starts_G[group : group + 2].tolist())
        for pair in pairs:
            chosen, rejected = (preferences.pairs_P2[pair] - first).tolist()
            is_tie = preferences.probabilities_P[pair] == TIE
            margin = f", margin {preferences.margins_P[pair]:g}" if preferences.margins_P[pair] else ""
            yield f"{chosen} is {'as good as' if is_tie else 'better than'} {rejected}{margin}"


def _prompts(prompts: Prompts, count: int) -> Iterator[str]:
    yield from prompts.describe()
    for prompt in prompts.train.take(0, count):
        yield f"\n--- {prompt.problem.problem_id}: {len(prompt.tokens_T)} tokens"
        yield readable(prompts.tokenizer, prompt.tokens_T)
        yield f"reference: {prompt.problem.answer or 'none'}"


def marked(tokenizer: Tokenizer, ids: Sequence[int], trained: Sequence[bool]) -> str:
    """Return the text of `ids`, with TRAINED around each run of tokens for which `trained` is True."""
    text, end = "", 0
    for is_trained, run in groupby(trained):
        begin, end = end, end + len(list(run))
        # With the preceding text: the first piece of a text loses its space when decoded without it (sentencepiece).
        before, whole = readable(tokenizer, ids[:begin]), readable(tokenizer, ids[:end])
        part = whole[len(before) :] if whole.startswith(before) else readable(tokenizer, ids[begin:end])
        text += f"{TRAINED[0]}{part}{TRAINED[1]}" if is_trained else part
    return text


def readable(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of `ids`, with special tokens that decode to nothing shown by name."""
    text = ""
    for is_special, group in groupby(ids, key=tokenizer.special_ids.__contains__):
        run = list(group)
        text += "".join(token_name(tokenizer, token) for token in run) if is_special else tokenizer.decode(run)
    return text
