"""Make a Megatron dataset of text files: thin wrapper over mcore_rl.data.preprocess."""

import argparse
import sys
from pathlib import Path

from mcore_rl.errors import McoreRlError

EXAMPLE = """example:
  python tools/preprocess.py corpus/train.jsonl --output data/train --tokenizer data/tok.model --workers 8
  python tools/preprocess.py books/ --format text --output data/books --tokenizer models/qwen3

A killed run goes on where it was when the same command is given again."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tools/preprocess.py",
        description="Text files to PREFIX.bin and .idx (Megatron's format) and PREFIX.json (their origin).",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "inputs", nargs="+", type=Path, help="files, or folders of files; their order is the documents' order"
    )
    p.add_argument(
        "--output", required=True, type=Path, metavar="PREFIX", help="where to write, without an ending"
    )
    p.add_argument(
        "--tokenizer",
        required=True,
        type=Path,
        help="a sentencepiece .model, or a folder with tokenizer.json",
    )
    p.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    p.add_argument("--format", choices=("jsonl", "text"), help="default: by the files' endings")
    p.add_argument("--key", default="text", help="JSON lines: the field with the text (default 'text')")
    cuts = p.add_mutually_exclusive_group()
    cuts.add_argument(
        "--split-blank-lines", action="store_true", help="plain text: blank lines part documents"
    )
    cuts.add_argument(
        "--document-separator",
        metavar="LINE",
        help="plain text: lines equal to this part documents (default: a file is one)",
    )
    p.add_argument(
        "--max-bad", type=int, metavar="N", help="fail on more than N bad lines (default: report and go on)"
    )
    p.add_argument(
        "--overwrite", action="store_true", help="replace an existing dataset or another unfinished run"
    )
    return p


def main() -> int:
    """Parse, run, say where the results are."""
    command = parser()
    args = command.parse_args()
    # Imported only now, because Megatron takes seconds and --help should not.
    from rich.console import Console

    from mcore_rl.config.data import TokenizerConfig
    from mcore_rl.data.documents import Layout, find_sources, layout_kind
    from mcore_rl.data.preprocess import PreprocessOptions, preprocess

    separator = "" if args.split_blank_lines else args.document_separator
    try:
        layout = Layout(
            kind=args.format or layout_kind(find_sources(args.inputs)),
            key=args.key,
            separator=separator,
        )
        tokenizer = TokenizerConfig(
            kind="huggingface" if args.tokenizer.is_dir() else "sentencepiece", path=str(args.tokenizer)
        )
        options = PreprocessOptions(
            inputs=tuple(args.inputs),
            output=args.output,
            tokenizer=tokenizer,
            layout=layout,
            workers=args.workers,
            max_bad=args.max_bad,
            overwrite=args.overwrite,
        )
        preprocess(options, Console())
    except McoreRlError as error:
        command.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        command.exit(130, "stopped; the same command goes on where it was\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
