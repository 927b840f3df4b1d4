"""`mcore-rl config` shows a config after all checks; `mcore-rl report` writes a page about runs, or serves it."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from mcore_rl.checks.inputs import absent_inputs
from mcore_rl.checks.mesh import mesh_dependences
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.kinds import KINDS, READERS
from mcore_rl.config.load import dump_config, kind_of, load_config
from mcore_rl.errors import ConfigError, after_echo
from mcore_rl.report.page import LiveServer, write_report
from mcore_rl.storage.run_config import with_origins


def show_config(args: argparse.Namespace) -> int:
    """Print the config as TOML, with the origin of each set value. Raises ConfigError if a check fails."""
    path = Path(args.config)
    kind = args.program or kind_of(path, args.overrides)
    if kind not in PROGRAMS:
        written = load_config(KINDS[kind], path, args.overrides)
        sys.stdout.write(f"# fields of a {kind}, which {READERS[kind]} checks\n{dump_config(written)}")
        return 0
    config, ranks = PROGRAMS[kind].checked_config(path, args.overrides, args.ranks)
    _, origins = with_origins(PROGRAMS[kind].config, path, args.overrides)
    absent = (f"warning: {sentence}" for sentence in absent_inputs(config))
    sys.stderr.writelines(f"{line}\n" for line in (*absent, *mesh_dependences(config, ranks)))
    sys.stdout.write(f"# mcore-rl {kind}; passes all checks on {ranks} ranks\n{dump_config(config, origins)}")
    return 0


def make_report(args: argparse.Namespace) -> int:
    """Write the page and print its path and the number of warnings, or serve it; `args` from `mcore-rl report`."""
    if args.serve:
        with LiveServer(args.runs, args.port or 0) as server:
            sys.stdout.write(f"{server.url} follows {', '.join(map(str, args.runs))}; Ctrl-C ends it\n")
            sys.stdout.flush()
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                sys.stdout.write(f"{after_echo()}ended\n")
        return 0
    if args.port is not None:
        raise ConfigError(f"--port {args.port} is of a page that follows its runs. Add --serve.")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        found = write_report(args.runs, args.output)
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be written: {error.strerror}. Choose another.") from None
    levels = Counter(notice.level for notice in found)
    counts = "".join(f"; {number} {level}{'s' * (number > 1)}" for level, number in levels.items())
    size_kib = args.output.stat().st_size / 1024
    sys.stdout.write(f"{args.output}: {len(args.runs)} run{'s' * (len(args.runs) > 1)}, {size_kib:.0f} KiB{counts}\n")
    return 0
