"""`mcore-rl config`: show the config that a run would use, after all checks."""

import argparse
import sys
from pathlib import Path

from mcore_rl.checks.dependences import mesh_dependences
from mcore_rl.checks.inputs import absent_inputs, inputs_of
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.kinds import KINDS, READERS
from mcore_rl.config.load import dump_config, kind_of, load_config
from mcore_rl.storage.run_config import with_origins


def main(args: argparse.Namespace) -> int:
    """Print the config as TOML, with the origin of each set value. Raises ConfigError if a check fails."""
    path = Path(args.config)
    kind = args.program or kind_of(path, args.overrides)
    if kind not in PROGRAMS:
        written = load_config(KINDS[kind], path, args.overrides)
        sys.stdout.write(f"# fields of a {kind}, which {READERS[kind]} checks\n{dump_config(written)}")
        return 0
    config, origins = with_origins(PROGRAMS[kind].config, path, args.overrides)
    ranks = PROGRAMS[kind].checked_ranks(config, args.ranks)
    for sentence in [*absent_inputs(inputs_of(config)), *mesh_dependences(config, ranks)]:
        sys.stderr.write(f"warning: {sentence}\n")
    sys.stdout.write(f"# mcore-rl {kind}; passes all checks on {ranks} ranks\n{dump_config(config, origins)}")
    return 0
