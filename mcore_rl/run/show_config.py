"""`mcore-rl config`: the config that a run would use, after all checks."""

import argparse
import sys
from pathlib import Path

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import dump_config


def main(args: argparse.Namespace) -> int:
    """Print the config as TOML; ConfigError when a check fails."""
    program = PROGRAMS[args.program]
    config, ranks = program.checked_config(Path(args.config), args.overrides, args.ranks)
    sys.stdout.write(f"# passes all checks on {ranks} ranks\n{dump_config(config)}")
    return 0
