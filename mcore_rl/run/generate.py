"""`mcore-rl generate`: what a run has learned to write, on one process, whatever mesh it was trained on."""

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.processes import rank_guard
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl import EngineConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.section import Section
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.model.build import build_model
from mcore_rl.model.checkpoint.weights import load_weights
from mcore_rl.parallel.mesh import build_mesh, seed_ranks
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.megatron import MegatronEngine
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion, Problem, Prompt

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the config.toml of a run of any kind says about its model."""

    model: ModelConfig
    platform: PlatformConfig
    tokenizer: TokenizerConfig


def main(args: argparse.Namespace) -> int:
    """Print the prompt and its continuations; `args` as `mcore-rl generate` declares them."""
    with rank_guard():
        _check(args)
        trained = read_run(args.run or run_of(args.checkpoint))
        tokenizer = load_tokenizer(trained.tokenizer)
        for number, completion in enumerate(continuations(args, trained, tokenizer), start=1):
            if args.n > 1:
                sys.stdout.write(f"--- {number} of {args.n}\n")
            sys.stdout.write(f"{args.prompt}{completion.text}\n")
        platforms.stop()
    return 0


def continuations(args: argparse.Namespace, trained: Trained, tokenizer: Tokenizer) -> tuple[Completion, ...]:
    """`args.n` of them, each to the end of the document or `args.tokens` tokens."""
    # TransformerEngine's attention has no cache of ours; the weights are the same.
    settings = trained.platform.model_copy(update={"recompute": "none", "layers": "torch", "fp8": "none"})
    mesh_config = MeshConfig()
    platform = platforms.start(settings)
    mesh = build_mesh(mesh_config)
    seed_ranks(args.seed)
    chunks = build_model(trained.model, mesh, platform, settings)
    load_weights(chunks, mesh, trained.model, args.checkpoint or args.run)
    engine = MegatronEngine(chunks, mesh, trained.model, tokenizer.decode, EngineConfig())
    tokens_T = tuple(tokenizer.encode(args.prompt)) or (tokenizer.eod_id,)
    prompt = Prompt(problem=Problem(problem_id="--prompt", prompt=args.prompt, answer=""), tokens_T=tokens_T)
    sampling = Sampling(
        max_new_tokens=args.tokens,
        cut=Cut(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
        stop_tokens=frozenset([tokenizer.eod_id]),
    )
    seeds_1G = [range(args.seed, args.seed + args.n)]
    return engine.generate([prompt], sampling, seeds_1G)[0].completions


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that wrote `checkpoint`: the nearest above with a config.toml."""
    for folder in (checkpoint.absolute(), *checkpoint.absolute().parents):
        if (folder / "config.toml").is_file():
            return folder
    raise ConfigError(
        f"--checkpoint {checkpoint}: there is no config.toml there or above, which says what model and tokenizer it "
        "is of. Name the folder of a run with the same: --run."
    )


def read_run(folder: Path) -> Trained:
    """The parts of `folder`/config.toml that runs of all kinds have."""
    path = folder / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Give --run the run_dir of a training."
        ) from None
    return Trained(
        model=_section(ModelConfig, tables.get("model", {})),
        platform=_section(PlatformConfig, tables.get("platform", {})),
        tokenizer=_section(TokenizerConfig, tables.get("data", {}).get("tokenizer", {})),
    )


def _section(cls: type[S], table: dict[str, Any]) -> S:
    # From JSON pydantic's strict mode reads lists as tuples and 1 as 1.0.
    return cls.model_validate_json(json.dumps(table))


def _check(args: argparse.Namespace) -> None:
    if args.run is None and args.checkpoint is None:
        raise ConfigError("There is nothing to generate with: give --run RUN_DIR, --checkpoint DIR, or both.")
    if args.n > 1 and args.temperature == 0.0:
        raise ConfigError(
            f"--n {args.n} at temperature 0 is {args.n} times the same text. Give --temperature 0.7, or leave out --n."
        )
    limits = {
        "--temperature": (args.temperature >= 0, "0 or more"),
        "--top-k": (args.top_k >= 0, "0 (all) or more"),
        "--top-p": (0 < args.top_p <= 1, "above 0 and at most 1 (all)"),
        "--min-p": (0 <= args.min_p < 1, "from 0 (all) to below 1"),
    }
    for name, (is_right, wanted) in limits.items():
        if not is_right:
            raise ConfigError(f"{name} {vars(args)[name[2:].replace('-', '_')]}, wanted {wanted}.")
