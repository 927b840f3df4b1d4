"""The commands that make, show and score data."""

import argparse
from pathlib import Path

from mcore_rl.cli.commands import CONFIG_HELP, Command, add_overrides, add_program
from mcore_rl.launch.arguments import number_from, positive


def _tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    _corpus(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.model", help="the file to write")
    parser.add_argument(
        "--vocab-size", required=True, type=int, help="pieces, the 260 of bytes and special tokens included"
    )
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default bpe")
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        help="fraction of characters that get a piece (default 0.9995)",
    )
    parser.add_argument(
        "--max-mb", type=int, default=512, help="train on at most this much of the corpus (default 512)"
    )
    parser.add_argument("--threads", type=int, default=4, help="default 4; the digest of the file depends on it")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    _corpus(parser)
    parser.add_argument(
        "--output", required=True, type=Path, metavar="PREFIX", help="where to write, without an ending"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=Path,
        help="a sentencepiece .model, or a folder with tokenizer.json or tiktoken.model",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    cuts = parser.add_mutually_exclusive_group()
    cuts.add_argument("--split-blank-lines", action="store_true", help="plain text: blank lines separate documents")
    cuts.add_argument(
        "--document-separator",
        metavar="LINE",
        help="plain text: lines equal to this separate documents (default: one document a file)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing dataset or another unfinished run"
    )


def _show_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help=f"{CONFIG_HELP}; or a file of data, of which the first records are shown by their shape",
    )
    add_overrides(parser)
    parser.add_argument("--num", type=positive, default=3, help="number of examples (default 3)")
    add_program(parser)


def _problems_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="an RL config, a file or the name of a recipe, whose rl.prompts.task is used"
    )
    add_overrides(parser)
    parser.add_argument("--count", type=positive, default=10000, help="number of problems (default 10000)")
    parser.add_argument(
        "--preferences", action="store_true", help="write pairs for a reward model: the right answer and a wrong one"
    )
    parser.add_argument(
        "--faults",
        choices=("character", "any"),
        default="character",
        help="what is wrong in a pair's wrong answer: a character; or, each as often, a character replaced, left out, "
        "added, or swapped with the next one, or all of it (default character)",
    )
    parser.add_argument(
        "--cut-fraction",
        type=number_from(0, 1, float),
        default=0.0,
        metavar="FRACTION",
        help="give the responses a bad habit: in this fraction of them, drawn at random, the last character is "
        "missing. A model that imitates them forgets it as often, and reinforcement learning has something to unlearn "
        "(default 0)",
    )
    parser.add_argument("--output", type=Path, required=True, help="the file to write, JSON lines")
    parser.add_argument(
        "--valid",
        type=int,
        default=0,
        metavar="COUNT",
        help="also write so many problems that are not in OUTPUT to the file beside it (pairs_valid.jsonl for "
        "pairs.jsonl), to validate on (default 0)",
    )


def _reward_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="an RL config, a file or the name of a recipe")
    add_overrides(parser)
    parser.add_argument("--sample", type=positive, default=4, help="number of prompts (default 4)")
    parser.add_argument(
        "--completion",
        metavar="TEXT",
        help="the completion to score, in which {answer} stands for a reference answer: the prompt's own, then the "
        "next prompt's (default: {answer} alone)",
    )


def _corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", type=Path, help="files, or folders of files; their order is the documents' order"
    )
    parser.add_argument("--format", choices=("jsonl", "text"), help="default: by the files' endings")
    parser.add_argument("--key", default="text", help="JSON lines, tables: the field with the text (default 'text')")
    parser.add_argument(
        "--max-bad",
        type=number_from(0, 1, float),
        default=0.01,
        metavar="SHARE",
        help="fail if a larger share of the documents is bad; fewer are reported and left out (default 0.01)",
    )


DATA: dict[str, Command] = {
    "data tokenizer": Command(
        brief="train a sentencepiece tokenizer",
        summary="Train a sentencepiece tokenizer (byte fallback, single digits) on JSON lines or text. "
        "Ids: 0 unknown, 1 begin of text, 2 end of document, 3 padding.",
        example="mcore-rl data tokenizer corpus/train.jsonl --vocab-size 2048 --output data/tokenizer.model",
        arguments=_tokenizer_arguments,
        module="mcore_rl.cli.data",
        main="make_tokenizer",
    ),
    "data preprocess": Command(
        brief="encode text as .bin/.idx",
        summary="Encode text files as PREFIX.bin and .idx (Megatron's format) and PREFIX.json (their origin). "
        "A killed run resumes when the same command is given again.",
        example="mcore-rl data preprocess corpus/train.jsonl --output data/train --tokenizer data/tok.model "
        "--workers 8",
        arguments=_preprocess_arguments,
        module="mcore_rl.cli.data",
        main="make_dataset",
    ),
    "data show": Command(
        brief="show training examples, or how a file is read",
        summary="Show the first training examples of a config as the model reads them: sequences of pretraining, chats "
        "with what is trained on marked, prompts with their reference answers. It starts no ranks.",
        example="mcore-rl data show tiny_moe/sft --num 3",
        arguments=_show_data_arguments,
        module="mcore_rl.cli.data",
        main="show_examples",
    ),
    "problems": Command(
        brief="write problems of a built-in task to fine-tune on",
        summary="Write problems of an RL config's built-in task with their answers, to fine-tune on; none is held out.",
        example="mcore-rl problems tiny_moe/grpo --count 20000 --output runs/quickstart/chat.jsonl",
        arguments=_problems_arguments,
        module="mcore_rl.cli.problems",
        main="write_problems",
    ),
    "reward": Command(
        brief="try a reward on completions, without a model",
        summary="Show what an RL config's reward gives to completions of its own prompts; it needs no model.",
        example="mcore-rl reward tiny_moe/grpo --sample 4",
        arguments=_reward_arguments,
        module="mcore_rl.cli.problems",
        main="score_completions",
    ),
}
