"""Train a sentencepiece tokenizer: thin wrapper over mcore_rl.data.tokenizer_training."""

import argparse
import sys
from pathlib import Path

from mcore_rl.errors import McoreRlError

EXAMPLE = """example:
  python tools/train_tokenizer.py corpus/train.jsonl --vocab-size 2048 --output data/tokenizer.model"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tools/train_tokenizer.py",
        description="Train a sentencepiece tokenizer (byte fallback, single digits) on JSON lines or text. "
        "Ids: 0 unknown, 1 begin of text, 2 end of document, 3 padding.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("inputs", nargs="+", type=Path, help="files, or folders of files")
    p.add_argument("--output", required=True, type=Path, metavar="FILE.model", help="the file to write")
    p.add_argument(
        "--vocab-size", required=True, type=int, help="pieces, the 260 of bytes and special tokens included"
    )
    p.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default bpe")
    p.add_argument("--format", choices=("jsonl", "text"), help="default: by the files' endings")
    p.add_argument("--key", default="text", help="JSON lines: the field with the text (default 'text')")
    p.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        help="share of characters with a piece (default 0.9995)",
    )
    p.add_argument(
        "--max-mb", type=int, default=512, help="of a larger corpus, train on so much (default 512)"
    )
    p.add_argument("--threads", type=int, default=4, help="default 4; the file's digest depends on it")
    p.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return p


def main() -> int:
    """Parse, run, say where the result is."""
    command = parser()
    args = command.parse_args()
    # Imported only now, because Megatron takes seconds and --help should not.
    from rich.console import Console

    from mcore_rl.data.documents import Layout, find_sources, layout_kind
    from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer

    if args.output.exists() and not args.overwrite:
        command.exit(
            2, f"error: {args.output} exists already. Give another output, or --overwrite to replace it.\n"
        )
    try:
        options = TokenizerTraining(
            inputs=tuple(args.inputs),
            output=args.output,
            layout=Layout(kind=args.format or layout_kind(find_sources(args.inputs)), key=args.key),
            vocab_size=args.vocab_size,
            model_type=args.model_type,
            character_coverage=args.character_coverage,
            max_bytes=args.max_mb << 20,
            threads=args.threads,
        )
        lines = train_tokenizer(options)
    except McoreRlError as error:
        command.exit(2, f"error: {error}\n")
    Console().print(
        f"{args.output}: {args.vocab_size} pieces ({args.model_type}) from {lines} lines", soft_wrap=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
