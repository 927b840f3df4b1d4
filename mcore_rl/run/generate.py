"""`mcore-rl generate`: a few tokens of what a run has learned, on one process, whatever mesh it was trained on."""

import argparse
import itertools
import sys

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


def main(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation; `args` as `mcore-rl generate` declares them."""
    with rank_guard():
        config = load_config(PretrainConfig, args.run / "config.toml", ())
        tokenizer = load_tokenizer(config.data.tokenizer)
        sys.stdout.write(args.prompt + continuation(args, config, tokenizer) + "\n")
        platforms.stop()
    return 0


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
