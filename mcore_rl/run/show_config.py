"""`mcore-rl config`: show the config that a run would use, after all checks, or rewrite one of an earlier version."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.checks.dependences import mesh_dependences
from mcore_rl.checks.inputs import absent_inputs
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.kinds import KINDS, READERS
from mcore_rl.config.load import dump_config, kind_of, load_config
from mcore_rl.config.migrate import BACKUP, migrate_file
from mcore_rl.errors import ConfigError


def main(args: argparse.Namespace) -> int:
    """Print the config as TOML, or migrate files; ConfigError when a check fails or a file cannot be rewritten."""
    if args.migrate:
        return migrate(args.migrate)
    if args.config is None:
        raise ConfigError(
            "No config file is named. Give CONFIG.toml, or --migrate FILE to rewrite an older one."
        )
    path = Path(args.config)
    kind = args.program or kind_of(path, args.overrides)
    if kind not in PROGRAMS:
        written = load_config(KINDS[kind], path, args.overrides)
        sys.stdout.write(f"# fields of a {kind}, which {READERS[kind]} checks\n{dump_config(written)}")
        return 0
    config, ranks = PROGRAMS[kind].checked_config(path, args.overrides, args.ranks)
    for sentence in [*absent_inputs(config), *mesh_dependences(config, ranks)]:
        sys.stderr.write(f"warning: {sentence}\n")
    sys.stdout.write(f"# mcore-rl {kind}; passes all checks on {ranks} ranks\n{dump_config(config)}")
    return 0


def migrate(paths: Sequence[Path]) -> int:
    """Rewrite config files of an earlier version in place and print what changed."""
    for path in map(Path, paths):
        changes = migrate_file(path)
        backup = f"; the old file is {path}{BACKUP}" if changes else ""
        sys.stdout.write(f"{path}: {len(changes)} changes{backup}\n")
        sys.stdout.writelines(f"  {change}\n" for change in changes)
    return 0
