"""`mcore-rl convert`: one machine, no GPU, no process group."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.convert.copying.conversion import Conversion, Settings, convert
from mcore_rl.convert.copying.forecast import mesh_lines, plan_lines
from mcore_rl.convert.copying.progress import ByteProgress
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.hf.model import open_hf_model
from mcore_rl.convert.importing import ImportOptions, import_targets, plan_import
from mcore_rl.convert.logits import largest_distance
from mcore_rl.convert.megatron.layouts import Layout, native
from mcore_rl.convert.megatron.model import open_dist_model
from mcore_rl.convert.relayout import plan_relayout
from mcore_rl.convert.verify import compare, is_hf
from mcore_rl.errors import ConfigError

MOST_LINES = 100
"""Differences that are listed."""


def main(args: argparse.Namespace) -> int:
    """Status: 0, or 1 when `verify` finds a difference."""
    _check(args)
    with ByteProgress(Console(), args.log) as progress:
        return ACTIONS[args.action](args, progress)


def report_differences(one: Path, other: Path, args: argparse.Namespace, progress: ByteProgress) -> int:
    """Lists what differs; how many tensors do."""
    found = compare(one, other, args.reference, args.mtp, progress)
    for difference in found[:MOST_LINES]:
        progress.say(str(difference))
    if len(found) > MOST_LINES:
        progress.say(f"... and {len(found) - MOST_LINES} more")
    progress.say(f"{len(found)} differences" if found else "no difference")
    progress.event("verify", differences=[str(difference) for difference in found])
    return len(found)


def _plan(args: argparse.Namespace, progress: ByteProgress) -> int:
    source, settings = args.paths[0], _settings(args)
    output = args.paths[1] if len(args.paths) == 2 else Path(f"{source.name}-converted")
    conversion = (_import if is_hf(source) else _export)(source, output, args, settings)
    for line in (*conversion.notes, *plan_lines(conversion, settings)):
        progress.say(line)
    if args.mesh:
        for line in _by_rank(args):
            progress.say(line)
    return 0


def _by_rank(args: argparse.Namespace) -> list[str]:
    """Of the model as our training loads it."""
    source, mesh = args.paths[0], MeshConfig(**args.mesh)
    if is_hf(source):
        hf = open_hf_model(source, mtp=args.mtp, vocab_multiple=args.vocab_multiple)
        targets = import_targets(hf, hf.weights, args.dtype)
        return list(mesh_lines(hf.model, {t.name: (t.shape, t.dtype.itemsize) for t in targets}, mesh))
    found = open_dist_model(source, args.reference, mtp=args.mtp)
    sizes = {
        block.mcore_key: found.dtype(there.mcore_key).itemsize
        for block, there in zip(found.canonical.blocks, found.weights.blocks, strict=True)
    }
    tensors = {key: (shape, sizes[key]) for key, shape in found.canonical.mcore_shapes.items()}
    return list(mesh_lines(found.model, tensors, mesh))


def _run(
    plan: Callable[[Path, Path, argparse.Namespace, Settings], Conversion],
) -> Callable[[argparse.Namespace, ByteProgress], int]:
    def run(args: argparse.Namespace, progress: ByteProgress) -> int:
        settings = _settings(args)
        convert(plan(args.paths[0], args.paths[1], args, settings), settings, progress)
        return 0

    return run


def _import(source: Path, output: Path, args: argparse.Namespace, settings: Settings) -> Conversion:
    options = ImportOptions(
        dtype=args.dtype, mtp=args.mtp, keys=args.keys, layers=args.layers, vocab_multiple=args.vocab_multiple
    )
    return plan_import(source, output, options, settings)


def _export(source: Path, output: Path, args: argparse.Namespace, settings: Settings) -> Conversion:
    options = ExportOptions(reference=args.reference, dtype=args.dtype, mtp=args.mtp)
    return plan_export(source, output, options, settings)


def _relayout(source: Path, output: Path, args: argparse.Namespace, settings: Settings) -> Conversion:
    layers = args.layers or native(open_dist_model(source, args.reference).model).layers
    return plan_relayout(source, output, Layout(args.keys, layers), args.reference, settings)


def _verify(args: argparse.Namespace, progress: ByteProgress) -> int:
    one, other = args.paths
    failed = report_differences(one, other, args, progress) > 0
    if args.logits:
        distance = largest_distance(one, other, args.reference, progress)
        progress.say(
            f"logits differ by at most {distance.logits:.3g} (rounding explains {distance.tolerance:.3g}), outputs of "
            f"layers by {distance.layers:.3g} of the largest"
        )
        failed = failed or not distance.is_small
    return int(failed)


ACTIONS: dict[str, Callable[[argparse.Namespace, ByteProgress], int]] = {
    "plan": _plan,
    "import": _run(_import),
    "export": _run(_export),
    "verify": _verify,
    "relayout": _run(_relayout),
}


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(workers=args.workers, max_ram_bytes=args.max_ram, overwrite=args.overwrite)


def _check(args: argparse.Namespace) -> None:
    """ConfigError for folders and options that the action does not take: what is set is used or refused."""
    wanted = (1, 2) if args.action == "plan" else (2,)
    if len(args.paths) not in wanted:
        raise ConfigError(
            f"convert {args.action} takes {' or '.join(map(str, wanted))} folders, got {len(args.paths)}."
        )
    allowed = {
        "plan": {"dtype", "mtp", "keys", "layers", "vocab_multiple", "reference", "mesh"},
        "import": {"dtype", "mtp", "keys", "layers", "vocab_multiple"},
        "export": {"dtype", "mtp", "reference"},
        "verify": {"mtp", "reference", "logits"},
        "relayout": {"keys", "layers", "reference"},
    }[args.action]
    defaults: dict[str, object] = {
        "dtype": "keep",
        "mtp": "keep",
        "keys": "te",
        "layers": None,
        "vocab_multiple": 0,
        "reference": None,
        "mesh": {},
        "logits": False,
    }
    for name, default in defaults.items():
        if name not in allowed and getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} means nothing to convert {args.action}. Leave it out."
            )
