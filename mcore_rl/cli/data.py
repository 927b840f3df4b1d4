"""`mcore-rl data tokenizer` and `mcore-rl data preprocess`: from text files to pretraining's data."""

import argparse
import sys

from rich.console import Console

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.documents import DocumentFormat, find_input_files, format_of_endings
from mcore_rl.data.preprocess import PreprocessOptions, preprocess
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer
from mcore_rl.errors import INTERRUPTED_STATUS


def main(args: argparse.Namespace) -> int:
    """Run `args.data_command`, which is "tokenizer" or "preprocess"."""
    return {"tokenizer": _tokenizer, "preprocess": _preprocess}[args.data_command](args)


def _tokenizer(args: argparse.Namespace) -> int:
    lines = train_tokenizer(
        TokenizerTraining(
            inputs=tuple(args.inputs),
            output=args.output,
            document_format=DocumentFormat(
                kind=args.format or format_of_endings(find_input_files(args.inputs)), key=args.key
            ),
            vocab_size=args.vocab_size,
            model_type=args.model_type,
            character_coverage=args.character_coverage,
            max_bytes=args.max_mb << 20,
            threads=args.threads,
            overwrite=args.overwrite,
        )
    )
    Console().print(
        f"{args.output}: {args.vocab_size} pieces ({args.model_type}) from {lines} lines", soft_wrap=True
    )
    return 0


def _preprocess(args: argparse.Namespace) -> int:
    options = PreprocessOptions(
        inputs=tuple(args.inputs),
        output=args.output,
        tokenizer=TokenizerConfig(
            kind="huggingface" if args.tokenizer.is_dir() else "sentencepiece", path=str(args.tokenizer)
        ),
        document_format=DocumentFormat(
            kind=args.format or format_of_endings(find_input_files(args.inputs)),
            key=args.key,
            # An empty separator is a blank line; with None a file is a single document.
            separator="" if args.split_blank_lines else args.document_separator,
        ),
        workers=args.workers,
        max_bad=args.max_bad,
        overwrite=args.overwrite,
    )
    try:
        preprocess(options, Console())
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command resumes it\n")
        return INTERRUPTED_STATUS
    return 0
