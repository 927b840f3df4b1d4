"""`mcore-rl report`: write one HTML page about runs, or show one that follows them."""

import argparse
import sys
from collections import Counter

from mcore_rl.errors import ConfigError
from mcore_rl.report.live import LiveServer
from mcore_rl.report.page import write_report


def main(args: argparse.Namespace) -> int:
    """Write the page and print its path and the number of warnings, or serve it; `args` from `mcore-rl report`."""
    if args.serve:
        return _serve(args)
    if args.port is not None:
        raise ConfigError(f"--port {args.port} is of a page that follows its runs. Add --serve.")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        found = write_report(args.runs, args.output)
    except OSError as error:
        raise ConfigError(
            f"--output {args.output} cannot be written: {error.strerror}. Choose another."
        ) from None
    levels = Counter(notice.level for notice in found)
    counts = "".join(f"; {number} {level}{'s' * (number > 1)}" for level, number in levels.items())
    size_kib = args.output.stat().st_size / 1024
    sys.stdout.write(
        f"{args.output}: {len(args.runs)} run{'s' * (len(args.runs) > 1)}, {size_kib:.0f} KiB{counts}\n"
    )
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    with LiveServer(args.runs, args.port or 0) as server:
        sys.stdout.write(f"{server.url} follows {', '.join(map(str, args.runs))}; Ctrl-C ends it\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("ended\n")
    return 0
