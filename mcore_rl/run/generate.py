"""`mcore-rl generate`: a few tokens of what a run has learned, on one process, whatever mesh it was trained on."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.processes import rank_guard
from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.model.build import build_model
from mcore_rl.model.checkpoint.weights import load_weights
from mcore_rl.model.sampling import continue_tokens
from mcore_rl.parallel.mesh import build_mesh, seed_ranks


def main(argv: Sequence[str]) -> int:
    """Print the prompt and its continuation by the newest checkpoint of a run."""
    args = parser().parse_args(argv)
    with rank_guard():
        config = load_config(PretrainConfig, args.run / "config.toml", ())
        tokenizer = load_tokenizer(config.data.tokenizer)
        sys.stdout.write(args.prompt + continuation(args, config, tokenizer) + "\n")
        platforms.stop()
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="mcore-rl generate",
        description=__doc__,
        epilog='example: mcore-rl generate --run runs/quickstart/pretrain --prompt "def read_" --tokens 40',
    )
    command.add_argument("--run", type=Path, required=True, help="the run_dir of the training")
    command.add_argument("--prompt", default="", help="text to continue; empty: from the start of a document")
    command.add_argument("--tokens", type=int, default=64, help="how many at the most (default 64)")
    command.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token (default 0)")
    command.add_argument("--seed", type=int, default=0, help="of the drawing at a temperature above 0")
    return command


def continuation(args: argparse.Namespace, config: PretrainConfig, tokenizer: Tokenizer) -> str:
    """Text up to the end of the document or `args.tokens` tokens."""
    settings = config.platform.model_copy(update={"recompute": "none"})
    platform = platforms.start(settings)
    mesh = build_mesh(MeshConfig())
    seed_ranks(args.seed)
    chunks = build_model(config.model, mesh, platform, settings)
    load_weights(chunks, mesh, config.model, args.run)
    tokens = continue_tokens(
        chunks[0],
        tokenizer.encode(args.prompt) or [tokenizer.eod_id],
        temperature=args.temperature,
        generator=torch.Generator().manual_seed(args.seed),
        limit=config.data.seq_length,
    )
    until_end = itertools.takewhile(lambda token: token != tokenizer.eod_id, tokens)
    return tokenizer.decode(list(itertools.islice(until_end, args.tokens)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
