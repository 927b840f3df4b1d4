"""Arguments of the commands that generate with, probe and serve a trained model."""

import argparse
from pathlib import Path

from mcore_rl.cli.commands.arguments import CONFIG_HELP, add_overrides
from mcore_rl.launch.arguments import positive


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a run or a checkpoint, a prompt, and how to sample tokens."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="the model, as --model")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="the prompt, as --prompt")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="the model: a Hugging Face folder (imported once, into a cache), an import, a checkpoint, the run_dir of "
        "a training, or a model of the hub that is in its local cache",
    )
    parser.add_argument("--run", type=Path, help="the run_dir of a training; its newest checkpoint is used")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="this checkpoint instead; without --run, its model and tokenizer are those of the run above it",
    )
    parser.add_argument(
        "--prompt",
        default="",
        help="text to continue, in which names of special tokens are these tokens; empty: the start of a document",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt: it is the user's turn in the chat template that the model was trained with; without "
        "--prompt, in a terminal, chat turn by turn",
    )
    parser.add_argument("--system", metavar="TEXT", help="--chat: the system's turn before the user's")
    parser.add_argument(
        "--answer", metavar="TEXT", help="--chat: beginning of the answer, which goes on from there"
    )
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens at most (default 64)")
    parser.add_argument("--n", type=positive, default=1, help="number of continuations (default 1)")
    parser.add_argument("--stream", action="store_true", help="show the text as it grows")
    parser.add_argument(
        "--url",
        help="ask this inference server, as http://node7:8000, which has weights of its own (mcore-rl probe); --run "
        "names the model and its tokenizer",
    )
    parser.add_argument(
        "--kind", choices=["vllm", "sglang"], default="vllm", help="--url: its software (default vllm)"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="--url: environment variable with the key that it asks for"
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="--url: certificates by which an https server is known"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: always the most likely token (default)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample among this many most likely tokens; 0: all (default)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample among the most likely tokens that have this probability together; 1: all (default)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="sample among tokens with this fraction of the largest probability; 0: all (default)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first continuation; each next one adds 1 (default 0)"
    )


def probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a run, a server, and the reference for the server's weights."""
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the run_dir of a training; its newest checkpoint is used"
    )
    parser.add_argument("--url", required=True, help="the server's address, as http://node7:8000")
    parser.add_argument(
        "--kind", choices=["vllm", "sglang"], default="vllm", help="its software (default vllm)"
    )
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="this checkpoint of the run instead")
    parser.add_argument(
        "--older",
        metavar="DIR",
        type=Path,
        help="another checkpoint of the same model, whose weights the server may have in part; default: the one before",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="type of the server's weights, as rl.engine.dtype; auto: the run's (default)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="limit of the difference in nats; default: 2e-4 for the largest in fp32, else 0.1 for the mean",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key that the server asks for"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="certificates by which an https server is known")


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config, the number of servers on this machine, and their ports."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)
    parser.add_argument("--count", type=positive, default=1, help="servers on this machine (default 1)")
    parser.add_argument(
        "--port",
        type=positive,
        default=8000,
        help="port of the first server; each next one adds 1 (default 8000)",
    )
