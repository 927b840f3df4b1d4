"""`mcore-rl plan`: memory of a config on a cluster, meshes that fit, and seconds per step. It starts no rank."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from mcore_rl.checks.cluster import check_cluster, placement
from mcore_rl.checks.programs import PROGRAMS, program_of
from mcore_rl.checks.run import refuse
from mcore_rl.cli.init import fit
from mcore_rl.config.cluster import ClusterConfig, RatesConfig
from mcore_rl.config.kinds import READERS, kind_of_config
from mcore_rl.config.load import dump_config, kind_of, load_config
from mcore_rl.config.recipes import config_file
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.metrics.attempts_file import read_attempts
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.planning.device import parse_gpus
from mcore_rl.planning.estimate import Estimate, Place, calibrated, estimate, place_of
from mcore_rl.planning.search import search
from mcore_rl.planning.text import (
    answer_line,
    as_json,
    calibration_lines,
    estimate_lines,
    nearest_text,
    rank_lines,
    search_lines,
    world_header,
    world_line,
    wrapped,
    yes_line,
)
from mcore_rl.planning.training import training_of
from mcore_rl.planning.weights import view_of_rank
from mcore_rl.storage.files import has_mark, refuse_replacing, write_atomically
from mcore_rl.storage.folders import HUB_NAME, find_model
from mcore_rl.storage.run_config import load_run_config

MAX_RANKS = 1_000_000
"""Largest world to plan, because ranks are computed individually."""
WORTH_IT = 0.6
"""Largest time of a step, as a part of that on half the ranks, at which more ranks are worth it."""
PLAN_MARK = "written by mcore-rl plan"
"""Marks files of --json, so that an earlier file is recognised."""


def main(args: argparse.Namespace) -> int:
    """Print the plan; ConfigError, with the nearest meshes that fit, if the config cannot run."""
    try:
        return _plan(args)
    except ConfigError as error:
        # Less than a plan's width, because a short message follows "ConfigError:" on its line.
        raise ConfigError(wrapped(str(error), 87, 2)) from None


def _plan(args: argparse.Namespace) -> int:
    _check(args)
    if args.lora_rank is not None:
        args.overrides = [*args.overrides, f"lora.rank={args.lora_rank}"]
    if args.calibrate is not None:
        return _calibrate(args)
    if args.config is None:
        raise ConfigError("CONFIG is missing. Give a recipe or a file, or --calibrate RUN.")
    if _is_model(args.config):
        return _fit(args)
    kind = args.program or kind_of(args.config, args.overrides)
    if kind not in PROGRAMS:
        raise ConfigError(f"{args.config} is a config of {kind}, which trains nothing. Give it to {READERS[kind]}.")
    config = load_run_config(PROGRAMS[kind].config, args.config, args.overrides)
    cluster = _cluster(args)
    config = config.decided(is_cuda=cluster.node.gpus > 0)
    place = place_of(
        cluster, server_nodes=args.server_nodes, completion_tokens=args.completion_tokens, imbalance=args.imbalance
    )
    if args.world:
        _write(_world_lines(kind, config, place, *args.world))
        return 0
    if not args.nodes:
        raise ConfigError("The number of nodes is missing. Give --nodes N, or --world 8..1024 for a table of sizes.")
    world_size = args.nodes * cluster.node.ranks_per_node
    if world_size > MAX_RANKS:
        raise ConfigError(f"--nodes {args.nodes} are {world_size} ranks; a plan is of at most {MAX_RANKS}.")
    if args.search:
        found = search(config, world_size, place)
        shown = found.shortlist()
        answer = f"no: {kind} fits on {world_size} ranks with none of the {found.tried:,} layouts that were tried"
        if shown:
            answer = yes_line(kind, found.training, place, shown[0].memory.total)
        _write([answer, *search_lines(found, shown)])
        if not shown:
            # Either the checks refuse the config, or all meshes need too much memory.
            try:
                program_of(config).check(config, world_size)
            except ConfigError as error:
                raise ConfigError(f"on {world_size} ranks:\n{error}") from None
            raise ConfigError(nearest_text(found))
        return 0
    plan = checked_estimate(config, world_size, place)
    if args.rank is not None and args.rank >= world_size:
        raise ConfigError(f"--rank {args.rank}, but the ranks are 0 to {world_size - 1}.")
    if args.rank is not None:
        view = view_of_rank(config.model, config.mesh, args.rank, world_size, place.ranks_per_node)
        _write([answer_line(kind, plan), *rank_lines(plan, view)])
    else:
        _write([answer_line(kind, plan), *estimate_lines(plan)])
    if args.json:
        values = {"comment": PLAN_MARK} | as_json(plan)
        _write_file("--json", args.json, json.dumps(values, indent=1) + "\n")
    if args.rank is not None:
        return 0
    if not plan.fits:
        raise ConfigError(nearest_text(search(config, world_size, place)))
    return 0


def _is_model(config: Path) -> bool:
    """Return whether CONFIG is a model's folder or name on the hub, and no file or recipe; ConfigError if neither."""
    if config.is_dir():
        return True
    try:
        config_file(config)
    except ConfigError as none:
        if not HUB_NAME.fullmatch(str(config)):
            raise
        try:
            find_model(str(config))
        except ConfigError:
            raise ConfigError(
                f"{none} If it is a model of the hub, download what is read of it: `hf download {config} config.json`."
            ) from None
        return True
    return False


def _fit(args: argparse.Namespace) -> int:
    if args.gpus is None or args.nodes or args.world or args.search or args.rank is not None:
        raise ConfigError(
            f"{args.config} is a model: `mcore-rl plan {args.config} --gpus 8xH100` says whether a training of the "
            "model in it fits. Other questions are about a CONFIG, in which model.path may name the folder."
        )
    return fit(args.config, parse_gpus(args.gpus), args.program or "sft", args.overrides)


def _cluster(args: argparse.Namespace) -> ClusterConfig:
    if args.gpus is None:
        cluster = load_config(ClusterConfig, args.cluster)
    else:
        gpus = parse_gpus(args.gpus)
        cluster = gpus.cluster()
        args.nodes = args.nodes or gpus.nodes
    check_cluster(cluster)
    return cluster


def _check(args: argparse.Namespace) -> None:
    if args.gpus is not None and (args.nodes or args.calibrate is not None):
        raise ConfigError("--gpus names all GPUs. Give it without --nodes and --calibrate.")
    if args.lora_rank is not None and args.calibrate is not None:
        raise ConfigError("--lora-rank is of a CONFIG, and --calibrate reads the config of a run. Leave it out.")
    of_one_plan = args.calibrate is None and not args.world and not args.search
    for name, path, is_written, use in (
        ("--output", args.output, args.calibrate is not None, "with --calibrate"),
        ("--json", args.json, of_one_plan, "of one CONFIG on --nodes N"),
    ):
        if path is not None and not is_written:
            raise ConfigError(f"{name} {path} is written only {use}. Leave it out.")
    if args.json is not None:
        _refuse_replacing(
            args, args.json, lambda path: None if has_mark(path, PLAN_MARK) else "is no output of `mcore-rl plan`"
        )
    if args.world and args.world[1] > MAX_RANKS:
        raise ConfigError(f"--world has {args.world[1]} ranks; a plan is of at most {MAX_RANKS}.")


def _refuse_replacing(args: argparse.Namespace, output: Path, foreign: Callable[[Path], str | None]) -> None:
    read = (("CONFIG", args.config), ("--cluster", args.cluster), ("--calibrate", args.calibrate))
    sources = [(name, Path(path)) for name, path in read if path is not None]
    refuse_replacing(output, sources, overwrite=True, foreign=foreign)


def _write_file(option: str, path: Path, content: str) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}. Name another file.") from error


def _calibrate(args: argparse.Namespace) -> int:
    run_dir: Path = args.calibrate
    attempts = read_attempts(run_dir)
    if not attempts or not (run_dir / "config.toml").is_file():
        raise ConfigError(f"--calibrate {run_dir} is no folder of a run. Give the run_dir of a training.")
    kind = kind_of(run_dir / "config.toml", ())
    if kind not in PROGRAMS:
        raise ConfigError(f"--calibrate {run_dir} is a run of {kind}, which trains nothing.")
    config = load_config(PROGRAMS[kind].config, run_dir / "config.toml")
    cluster = _cluster(args)
    training = training_of(config, attempts[-1].machine.ranks)
    plain = cluster.model_copy(update={"rates": RatesConfig()})
    records = [record for record in read_records(run_dir / FILE_NAME) if "event" not in record]
    place = place_of(plain, server_nodes=args.server_nodes, imbalance=args.imbalance)
    rates = calibrated(training, place, records, str(run_dir))
    found = cluster.model_copy(update={"rates": rates})
    _write(calibration_lines(rates))
    if args.output:
        text = dump_config(found)

        def edited(path: Path) -> str | None:
            # People edit cluster files, so an earlier output is replaced only if its text is unchanged.
            return None if path.read_bytes() == text.encode() else "has another text"

        _refuse_replacing(args, args.output, edited)
        _write_file("--output", args.output, text)
        sys.stdout.write(f"{args.output}: the cluster with these rates; give it to --cluster\n")
    return 0


def checked_estimate(config: RunConfig, world_size: int, place: Place) -> Estimate:
    """Return the estimate of a config that passes the checks, or raise ConfigError with the nearest that does."""
    try:
        program_of(config).check(config, world_size)
        refuse(placement(config.model, config.mesh, place.ranks_per_node, world_size).refused)
    except ConfigError as error:
        _write([f"no: {kind_of_config(config)} does not pass the checks on {world_size} ranks"])
        found = search(config, world_size, place)
        near = "No other mesh passes the checks either: these are not mistakes of the mesh alone."
        if found.refused < found.tried:
            near = nearest_text(found)
        raise ConfigError(f"on {world_size} ranks:\n{error}\n{near}") from None
    return estimate(training_of(config, world_size), place)


def _world_lines(kind: str, config: RunConfig, place: Place, world: int, largest: int) -> list[str]:
    rows, smallest, num_fitting, num_tried = [*world_header(training_of(config, world), place)], "", 0, 0
    before_s = math.inf
    while world <= largest:
        num_tried += 1
        try:
            program_of(config).check(config, world)
        except ConfigError as error:
            rows.append(f"{world:>7} refused: {str(error).splitlines()[0].removeprefix('- ')}")
        else:
            plan = estimate(training_of(config, world), place)
            rows.append(world_line(plan))
            if plan.fits:
                num_fitting += 1
                smallest = smallest or answer_line(kind, plan)
            seconds = plan.rl.seconds if plan.rl else plan.step.span.likely if plan.step else 0.0
            if seconds > WORTH_IT * before_s:
                share = seconds / before_s
                rows.append(f"{'':>7} {world} ranks hardly help: a step takes {share:.0%} of the time on half as many.")
            before_s = seconds or math.inf
        world *= 2
    answer = f"{smallest}; on {num_fitting} of {num_tried} sizes" if smallest else f"no: {kind} fits on none of these"
    return [answer, *rows]


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        # A line begins with a label of eight columns; tables have narrower lines.
        sys.stdout.write(wrapped(line, indent=8) + "\n")
