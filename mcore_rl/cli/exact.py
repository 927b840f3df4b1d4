"""The part of `mcore-rl plan --exact` that needs torch and Megatron: cli/plan.py starts it where no GPU is seen."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.errors import McoreRlError
from mcore_rl.fake_world.rank import bytes_of_rank
from mcore_rl.fake_world.recorder import record
from mcore_rl.fake_world.saved import saved_by_layers
from mcore_rl.planning.exact import EXACT, Exact
from mcore_rl.planning.training import training_of
from mcore_rl.storage.files import write_atomically
from mcore_rl.storage.run_config import load_run_config


def main(argv: Sequence[str]) -> int:
    """Build the ranks that the arguments ask for, and write an Exact, or the refusals, as JSON."""
    args = _arguments().parse_args(argv)
    try:
        config = load_run_config(PROGRAMS[args.program].config, args.config, args.overrides)
        asked = zip(args.ranks, args.updated, strict=True)
        training = training_of(config, args.world)
        ranks = [bytes_of_rank(training, rank, updated) for rank, updated in asked]
        mesh = config.mesh
        events = []
        if args.microbatches:
            events = record(mesh, args.microbatches)
        layers = (
            saved_by_layers(config.mesh, config.model, config.platform, config.lora) if args.layers else []
        )
        written = EXACT.dump_json(Exact(ranks=ranks, layers=layers, schedule=events)).decode()
    except McoreRlError as error:
        written = json.dumps({"refused": str(error)})
    write_atomically(args.output, written)
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--program", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument(
        "--updated", nargs="+", required=True, help="for each rank the model in whose update to count"
    )
    parser.add_argument("--microbatches", type=int, default=0, help="record the schedule of so many")
    parser.add_argument("--layers", action="store_true", help="count the activations of each kind of layer")
    parser.add_argument("--output", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
