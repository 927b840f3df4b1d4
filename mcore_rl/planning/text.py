"""Plans as text for people, and as JSON for programs."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from math import isinf
from typing import Any

from mcore_rl.config.cluster import RatesConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.planning.device import Rates
from mcore_rl.planning.estimate import Estimate, Place, StepEstimate
from mcore_rl.planning.memory import GIB, SERVER_REST_BYTES, Memory, SharedServer, disk_of
from mcore_rl.planning.rollout import PUBLISHED_FACTORS
from mcore_rl.planning.search import SPARE, WITHIN, Choice, Search, toml_lines
from mcore_rl.planning.training import Training
from mcore_rl.planning.weights import RankView

JSON_VERSION = 1
WIDTH, TABLE_WIDTH = 100, 80
"""Columns of a line of a plan, and of a table of meshes."""
LEAST_SHARE = 0.015
"""Minimum share of a step that is shown, except for the bubble and the host."""
RANKS_SHOWN = 8
HOUR_S = 3600
STORAGE_BYTES_PER_S = 2e9
"""Bytes that a node writes to a shared file system per second: a guess, which the text names."""


def wrapped(text: str, width: int = WIDTH, indent: int = 0) -> str:
    """Return a text with its lines wrapped between words; `indent` is of the lines that continue another."""
    shape = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in text.split("\n") for part in shape.wrap(line) or [""])


def ranks_text(training: Training, place: Place) -> str:
    """Return the number of ranks, with their device if it is known."""
    return f"{training.world_size} x {place.device.name}" if place.device else f"{training.world_size} ranks"


def yes_line(kind: str, training: Training, place: Place, used_bytes: int) -> str:
    """Return the answer for a training of `kind` that fits, of which the fullest rank needs `used_bytes`."""
    where, used, room = ranks_text(training, place), used_bytes / GIB, place.room_bytes / GIB
    if isinf(room):
        return f"yes: {kind} passes the checks on {where}, each with up to {used:.1f} GiB; their memory is not known"
    return f"yes: {kind} fits on {where} with at least {room - used:.1f} of {room:.1f} GiB free on each GPU"


def answer_line(kind: str, plan: Estimate) -> str:
    """Return whether a training of `kind` fits, as a line that begins with yes or no."""
    if plan.fits:
        return yes_line(kind, plan.training, plan.place, plan.fullest.total)
    needs, has, what = plan.fullest.total / GIB, plan.place.room_bytes / GIB, "the fullest GPU needs"
    if needs <= has:
        needs, has = plan.fullest_node_bytes / GIB, plan.place.host_bytes / GIB
        what = "main memory of a node needs"
    return f"no: {kind} does not fit on {ranks_text(plan.training, plan.place)}: {what} {needs:,.1f} of {has:,.1f} GiB"


def estimate_lines(plan: Estimate) -> Iterator[str]:
    """Yield the lines of a plan: layout, memory, time, limits, warnings."""
    training, fullest = plan.training, plan.fullest
    batch = f"{plan.num_microbatches} microbatches of {training.micro_batch} x {training.seq_length:,} tokens"
    yield f"mesh    {mesh_text(training)}; {batch}"
    yield f"memory  {memory_text(plan)}"
    names = " and ".join(model.name for model in training.models if model.on_host)
    if fullest.host:
        if fullest.server is not None and fullest.server.keeps_weights:
            names += " and for sleeping servers"
        yield f"        main memory for the {names}: {_node_gib(plan, fullest.host):,.0f} GiB a node"
    if any(model.trains and model.store != "device" for model in training.models):
        yield (
            f"        models by phase: rollout {_gib(fullest.rollout_models)}, scoring passes "
            f"{_gib(fullest.scoring_models)}, update {_gib(fullest.permanent)}, checkpoint "
            f"{_gib(fullest.saving_models)} GiB"
        )
    if fullest.server is not None:
        yield f"        {servers_text(plan, fullest, fullest.server)}"
    if fullest.host_routes:
        yield f"        main memory for routes (replay.store): {_node_gib(plan, fullest.host_routes):,.1f} GiB a node"
    for content, size in (
        ("the weights last sent (rl.engine.delta)", fullest.host_sent),
        ("the optimizer (optim.offload_fraction)", fullest.host_optimizer),
    ):
        if size:
            yield f"        main memory for {content}: {_node_gib(plan, size):,.0f} GiB a node"
    if plan.step is None:
        device = plan.place.device
        name = "node.device is not set" if device is None else f"no bandwidths of {device.name} are known"
        yield f"time    not planned: {name}"
        if plan.bubble is not None:
            yield f"bubble  {plan.bubble:.1%} of the schedule, if a backward pass takes twice a forward pass"
    else:
        yield from _step_lines(plan, plan.step)
        yield from _rl_lines(plan)
        yield run_line(plan)
    if load := load_text(plan):
        yield load
    for warning in plan.warnings:
        yield f"warn    {warning}"


def _node_gib(plan: Estimate, num_bytes: int) -> float:
    return num_bytes * plan.place.ranks_per_node / GIB


def _rl_lines(plan: Estimate) -> Iterator[str]:
    rollouts, step = plan.training.rollouts, plan.rl
    if rollouts is None:
        return
    if step is None:
        yield "rollout not planned: how many GPUs the servers have is not known. Give --server-nodes N"
        return
    shares = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in step.parts.items())
    lengths = (
        f"{rollouts.num_completions:,} completions of {step.mean_tokens:,.0f} tokens in the mean "
        f"(--completion-tokens), at most {rollouts.completion_tokens:,}"
    )
    if step.factors:
        yield f"rl step {_seconds(step.seconds)} s, calibrated with {plan.place.rates.source}: {shares}; {lengths}"
    else:
        low, high = PUBLISHED_FACTORS
        yield f"rl step at least {_seconds(step.seconds)} s: {shares}; {lengths}"
        yield (
            f"        a lower bound: published steps took {low:g} to {high:g} times as long; measure one, and give it "
            "to --calibrate"
        )
    if step.tail_s > 0:
        yield f"        in {_seconds(step.tail_s)} s of the rollout less than a tenth of the completions is in progress"


def run_line(plan: Estimate) -> str:
    """Return hours, GPU-hours and checkpoints of the whole run; the plan has times."""
    assert plan.step is not None
    training, gpus = plan.training, plan.training.world_size + plan.place.server_gpus
    low, high = plan.step.span.low, plan.step.span.high
    count, text = training.steps, ""
    if training.rollouts is not None:
        if plan.rl is None:
            return f"run     {training.steps:,} updates; {_checkpoints(plan)}"
        count = training.num_rollouts
        low = high = plan.rl.seconds
        text = "" if plan.rl.factors else "at least "
    hours = dict.fromkeys(seconds * count / HOUR_S for seconds in (low, high))
    shown, each = ("-".join(f"{hour * by:,.0f}" for hour in hours) for by in (1, gpus))
    return f"run     {training.steps:,} steps: {text}{shown} hours, {each} GPU-hours; {_checkpoints(plan)}"


def _checkpoints(plan: Estimate) -> str:
    # The file system decides the seconds to write a checkpoint.
    disk = disk_of(plan.training)
    nodes = -(-plan.training.world_size // plan.place.ranks_per_node)
    seconds = disk.checkpoint / (nodes * STORAGE_BYTES_PER_S)
    return (
        f"{disk.num_checkpoints} checkpoints of {disk.checkpoint / GIB:,.0f} GiB, each {_seconds(seconds)} s of "
        f"writing at {STORAGE_BYTES_PER_S / 1e9:g} GB/s a node"
    )


def mesh_text(training: Training) -> str:
    """Return the axes of a mesh, and its experts'."""
    mesh = training.mesh
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "vpp": mesh.vpp, "cp": mesh.cp, "dp": training.replicas}
    text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"
    if training.model.is_moe:
        copies = training.world_size // (mesh.etp * mesh.ep * mesh.pp)
        etp = f" x etp {mesh.etp}" if mesh.etp > 1 else ""
        text += f"; experts: ep {mesh.ep}{etp}, {copies} {'copies' if copies > 1 else 'copy'}"
    return text


def memory_text(plan: Estimate) -> str:
    """Return the fullest stage's memory by its parts."""
    stage = plan.fullest
    room = plan.place.room_bytes
    of = "" if isinf(room) else f" of {room / GIB:.1f}"
    alive = f" ({plan.chunks_alive} chunks alive)" if plan.training.mesh.pp > 1 else ""
    text = (
        f"stage {stage.stage} is fullest: {_gib(stage.total)}{of} GiB: lasting {_gib(stage.permanent)} "
        f"(weights {_gib(stage.weights)}, gradients {_gib(stage.gradients)}, optimizer {_gib(stage.optimizer)}: "
        f"exact), activations {_gib(stage.activations + stage.recomputed)}{alive}"
    )
    if stage.logits:
        text += f", logits {_gib(stage.logits)}"
    if stage.routes:
        text += f", routes {_gib(stage.routes)}"
    if stage.rollout_cache:
        text += f"; in a rollout, instead of activations, a cache of {_gib(stage.rollout_cache)}"
    return text


def servers_text(plan: Estimate, memory: Memory, server: SharedServer) -> str:
    """Return the memory of the phases in which the servers on the ranks' GPUs are awake, and what is left for keys and
    values.
    """
    phases, text = memory.phases, ""
    generate = phases["generate"] - server.sample
    if not isinf(plan.place.room_bytes):
        room = max(0.0, plan.place.room_bytes - generate)
        samples = room / server.sample
        verdict = "" if samples >= 1 else "DOES NOT FIT: "
        text = (
            f", and {verdict}{_gib(room)} GiB of keys and values: {room / server.token:,.0f} tokens, "
            f"{samples:,.{0 if samples >= 1 else 1}f} completions at a time of the longest"
        )
    rest = SERVER_REST_BYTES / GIB
    return (
        f"servers on the same GPUs, each on {server.gpus}: push "
        f"{_gib(phases['push'])} GiB, generate {_gib(generate)}{text}; asleep {rest:g}"
    )


def _step_lines(plan: Estimate, timed: StepEstimate) -> Iterator[str]:
    yield f"{plan.training.step_name:7} {span_text(plan)}"
    shares = [
        f"{part} {share:.0%}"
        for part, share in timed.shares.items()
        if share >= LEAST_SHARE or part == "host waits" or (part == "bubble" and plan.training.mesh.pp > 1)
    ]
    yield f"shares  {', '.join(shares)}"
    first, *others = timed.limits
    rest = ", ".join(f"{limit.term} {max(0.0, limit.gain):.0%}" for limit in others[:4])
    yield f"limits  {first.term} would give {first.gain:.0%}, {rest}"
    yield f"range   {timed.span.reason}"


def load_text(plan: Estimate) -> str:
    """Return the line on the load of the experts: the planned load, or the cost of several; else empty."""
    rates, by_load = plan.place.rates, plan.fullest_by_load
    if rates.imbalance is not None and plan.training.model.is_moe and plan.training.mesh.ep > 1:
        return (
            f"experts the fullest rank's get {rates.imbalance:.3g} times the mean of tokens, in time and memory "
            f"({rates.imbalance_source})"
        )
    if not by_load:
        return ""
    loads = " / ".join(f"{load:g}x" for load in by_load)
    more = " / ".join(f"{(size - plan.fullest.total) / GIB:.1f}" for size in by_load.values())
    costs = f"{more} GiB"
    if plan.step is not None:
        lost = [f"{max(0.0, cost):.0%}".rstrip("%") for cost in plan.step.imbalance.values()]
        costs = f"{' / '.join(lost)} % of the speed and {costs}"
    text = f"warn    experts are taken as evenly loaded; the fullest rank at {loads} of the mean would cost {costs}"
    too_large = [load for load, size in by_load.items() if size > plan.place.room_bytes]
    if plan.fits and too_large:
        text += f", which does not fit from {min(too_large):g}x on"
    return f"{text} (--imbalance)"


def span_text(plan: Estimate) -> str:
    """Return the seconds of a step with their range; the plan has some."""
    timed = plan.step
    assert timed is not None
    span, what = timed.span, ""
    if plan.training.rollouts is not None:
        what = ", when every completion is as long as it may be"
    elif plan.training.answer_tokens is not None:
        what = ", when every answer is as long as it may be"
    return (
        f"{_seconds(span.likely)} s ({_seconds(span.low)}-{_seconds(span.high)}) for a {batch_text(plan.training)}: "
        f"{timed.tokens_per_s:,.0f} tokens/s a GPU, {timed.model_tflops:.0f} model TFLOP/s{what}"
    )


def batch_text(training: Training) -> str:
    """Return the batch that the seconds of a step are for."""
    unit = "sequences" if training.answer_tokens is None else "pairs"
    return f"batch of {training.global_batch:,} {'completions' if training.rollouts else unit}"


def world_header(training: Training, place: Place) -> Iterator[str]:
    """Yield the names of the columns of `world_line`."""
    if training.rollouts is None:
        yield f"A step is a {batch_text(training)} of up to {training.sample_length:,} tokens."
        yield f"{'ranks':>7} {'GiB':>6} {'fits':>5} {'s a step':>18} {'tokens/s a GPU':>15} {'the whole run':>22}"
        return
    servers = f"; servers on {place.server_gpus} GPUs beside them" if place.server_gpus else ""
    kind = f"calibrated with {place.rates.source}" if place.rates.rl_factors else "lower bounds"
    yield f"GiB by phase on the fullest stage of each; seconds of a whole step are {kind}{servers}"
    yield (
        f"{'ranks':>7} {'rollout':>8} {'scoring':>8} {'update':>7} {'fits':>5} {'rollout s':>10} {'train s':>8} "
        f"{'rl step s':>10} {'the whole run':>22}"
    )


def world_line(plan: Estimate) -> str:
    """Return a size of the world with its memory, whether it fits, its seconds, and the hours of the whole run."""
    training, world, fits = plan.training, plan.training.world_size, "yes" if plan.fits else "no"
    if training.rollouts is not None:
        first = "rollout" if plan.fullest.server is None else "generate"
        phases = [max(stage.phases[name] for stage in plan.stages) for name in (first, "scoring", "update")]
        rollout, scoring, update = (_gib(size) for size in phases)
        line = f"{world:>7} {rollout:>8} {scoring:>8} {update:>7} {fits:>5}"
        if plan.rl is None:
            return line
        generated = plan.rl.parts["rollout"]
        seconds = plan.rl.seconds * training.num_rollouts
        hours = f"{'' if plan.rl.factors else 'at least '}{seconds / HOUR_S:,.0f} hours"
        line += f" {_seconds(generated):>10} {_seconds(plan.rl.seconds - generated):>8}"
        return f"{line} {_seconds(plan.rl.seconds):>10} {hours:>22}"
    line = f"{world:>7} {plan.fullest.total / GIB:>6.1f} {fits:>5}"
    if plan.step is None:
        return line
    span = plan.step.span
    hours = "-".join(f"{seconds * training.steps / HOUR_S:,.0f}" for seconds in (span.low, span.high))
    line += f" {f'{span.likely:.3g} ({span.low:.3g}-{span.high:.3g})':>18}"
    return f"{line} {plan.step.tokens_per_s:>15,.0f} {f'{hours} hours':>22}"


def search_lines(found: Search, shown: list[Choice]) -> Iterator[str]:
    """Yield the counts of a search, and the table of the choices."""
    yield f"{found.tried:,} combinations of mesh, micro-batch and recomputation were tried: {found.refused:,} are"
    yield f"refused by the checks, {found.too_large:,} do not fit, {len(found.choices):,} fit."
    if not shown:
        return
    if narrow := len(found.choices) - len(found.with_spare()):
        yield f"{narrow:,} of them leave less than {SPARE:.0%} of the device's memory, and are left out."
    if shown[0].seconds is not None:
        yield f"A prediction cannot tell apart layouts within {WITHIN:g}x of the fastest: measure two."
    yield from choice_lines(found, shown)


def choice_lines(found: Search, shown: list[Choice]) -> Iterator[str]:
    """Yield a table of choices, and for each its fields, its costs, and in RL its seconds and memory by phase."""
    first, room, training = shown[0], found.place.room_bytes, found.training
    if first.seconds is not None:
        yield wrapped(_seconds_text(training, first, found.place), TABLE_WIDTH)
    row = "{:>3}{:>4}{:>4}{:>5}{:>4}{:>5}{:>9}{:>10}{:>11}{:>8}"
    yield row.format("#", "tp", "pp", "vpp", "cp", "ep", "GiB", "GiB free", "seconds", "to #1")
    for i, choice in enumerate(shown, start=1):
        mesh, free, seconds, slower = choice.mesh, "", "", ""
        if not isinf(room):
            free = _gib(room - choice.memory.total)
        if choice.seconds is not None and first.seconds is not None:
            seconds, slower = _seconds(choice.seconds), f"{choice.seconds / first.seconds - 1:+.0%}"
        sizes = i, mesh.tp, mesh.pp, mesh.vpp, mesh.cp, mesh.ep, _gib(choice.memory.total), free, seconds, slower
        yield row.format(*sizes).rstrip()
    for i, choice in enumerate(shown, start=1):
        yield wrapped(f"{i:>3}: {' '.join(toml_lines(found.changes(choice))) or 'as configured'}", TABLE_WIDTH, 5)
        for detail in _details(choice, found.place):
            yield wrapped(f"     {detail}", TABLE_WIDTH, 5)


def _seconds_text(training: Training, choice: Choice, place: Place) -> str:
    rollouts, update = training.rollouts, f"a {batch_text(training)} of up to {training.sample_length:,} tokens"
    if rollouts is None:
        return f"Seconds are of a step: {update}."
    if choice.rl is None:
        return f"Seconds are of an update: {update}. For those of a whole step give --server-nodes N."
    generator = "the engine on these ranks"
    if rollouts.engine.is_served:
        generator = f"servers on {place.server_gpus} GPUs" if place.server_gpus else "the servers of rl.engine"
    kind = f"calibrated with {place.rates.source}" if choice.rl.factors else "a lower bound"
    return (
        f"Seconds are of a whole step, {kind}: {rollouts.num_completions:,} completions by {generator}, each of "
        f"{choice.rl.mean_tokens:,.0f} tokens in the mean (--completion-tokens), logprobs, updates."
    )


def _details(choice: Choice, place: Place) -> Iterator[str]:
    mesh, training = choice.mesh, choice.training
    rollouts, platform = training.rollouts, training.platform
    if choice.rl is not None:
        yield f"seconds: {', '.join(f'{name} {_seconds(part)}' for name, part in choice.rl.parts.items())}"
    if rollouts is not None:
        yield f"GiB by phase: {', '.join(f'{phase} {_gib(size)}' for phase, size in choice.memory.phases.items())}"
    modules = "+".join(platform.recompute_modules)
    costs = {
        "the processor updates the weights": bool(training.optim.offload_fraction),
        "routes wait in main memory": bool(rollouts and training.model.is_moe and rollouts.route_store != "device"),
        f"recomputes {'all' if platform.recompute == 'full' else modules}": platform.recompute != "none",
        "experts' tokens go over nodes": training.model.is_moe and mesh.ep * mesh.etp > place.ranks_per_node,
        "a bubble": mesh.pp > 1 and mesh.vpp == 1,
    }
    if any(costs.values()):
        yield f"costs: {', '.join(cost for cost, is_paid in costs.items() if is_paid)}"


def nearest_text(found: Search) -> str:
    """Return the meshes that would fit with the fewest changes, with the lines to set; for messages."""
    choices, critic = found.nearest(), found.training.critic
    if not choices:
        text = "No mesh of this model fits on these ranks: use more nodes, shorter sequences or a smaller batch"
        if critic is not None and critic.store == "device":
            text += ', or let the critic wait in main memory (rl.advantage.critic.store="host")'
        return f"{text}."
    head = "The nearest that pass the checks and fit, with lines for the config or the command:"
    return "\n".join([head, *choice_lines(found, choices)])


def calibration_lines(rates: RatesConfig) -> Iterator[str]:
    """Yield the rates of a run as a section of the cluster's file, with their meaning as comments."""
    usual = Rates()
    yield "# For the cluster's file:"
    yield "[rates]"
    meaning = {
        "source": "",
        "host_layer_s": f"published runs: {usual.host_layer_s:g}",
        "imbalance": "tokens of the fullest rank's experts / the mean, on the run's mesh",
        "speed": "times the parts of the peaks that published runs reach",
        "rollout": "measured / the lower bound",
        "logprobs": "measured / the lower bound",
        "updates": "measured / planned, at the lengths of this run",
    }
    for name, comment in meaning.items():
        value = getattr(rates, name)
        if value is not None and (name != "speed" or value != 1.0):
            shown = toml_value(value if isinstance(value, str) else float(f"{value:.4g}"))
            yield f"{name} = {shown}" + (f"   # {comment}" if comment else "")


def rank_lines(plan: Estimate, view: RankView) -> Iterator[str]:
    """Yield a rank's coordinates and contents."""
    coordinates = " ".join(f"{name} {index}" for name, index in view.coordinates.items())
    yield f"rank {view.rank} on node {view.node}: {coordinates}"
    for name, group in view.groups.items():
        shown = ", ".join(map(str, group.ranks[:RANKS_SHOWN]))
        more = f", ... {group.ranks[-1]}" if len(group.ranks) > RANKS_SHOWN else ""
        where = "inside its node" if group.num_nodes == 1 else f"over {group.num_nodes} nodes"
        yield f"group   {name}: {len(group.ranks)} ranks {where}: {shown}{more}"
    yield f"layers  {_ranges(view.layers)}"
    if plan.training.model.is_moe:
        yield f"experts {view.experts.start}-{view.experts.stop - 1} of each MoE layer"
    yield f"memory  {plan.stages[view.coordinates['pp']].describe()}"


def as_json(plan: Estimate) -> dict[str, Any]:
    """Return a plan as JSON values; sizes are bytes, times seconds."""
    return {
        "version": JSON_VERSION,
        "world": plan.training.world_size,
        "device": plan.place.device.name if plan.place.device else None,
        "mesh": plan.training.mesh.model_dump(mode="json"),
        "micro_batch": plan.training.micro_batch,
        "num_microbatches": plan.num_microbatches,
        "seq_length": plan.training.seq_length,
        "recompute": plan.training.platform.recompute,
        "room_bytes": None if isinf(plan.place.room_bytes) else plan.place.room_bytes,
        "fits": plan.fits,
        "stages": [asdict(stage) | {"total": stage.total} for stage in plan.stages],
        "chunks_alive": plan.chunks_alive,
        "bubble": plan.bubble,
        "imbalance": plan.place.rates.imbalance,
        "fullest_by_load": plan.fullest_by_load,
        plan.training.step_name: None if plan.step is None else asdict(plan.step),
        "rl_step": None if plan.rl is None else asdict(plan.rl) | {"seconds": plan.rl.seconds},
        "warnings": plan.warnings,
    }


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return 0-3, 8-11 of 0, 1, 2, 3, 8, 9, 10, 11."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"
