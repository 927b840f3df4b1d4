"""`mcore-rl serve` runs inference servers on this machine; `mcore-rl probe` compares one's weights with a run's."""

import argparse
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl.rollout import SERVED
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.model.build import local_shards
from mcore_rl.programs.inputs import load_model
from mcore_rl.rl.engines import server_process
from mcore_rl.rl.engines.probe import FEWEST_EXPERT_TOKENS, Probe, ProbeDifference, ProbeReference, difference_of
from mcore_rl.rl.engines.server_api import server_apis
from mcore_rl.storage.checkpoint import find_checkpoint, path_of_step, saved_steps
from mcore_rl.storage.folders import read_run, stored_lora
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.workers.rank_guard import rank_guard

GPU_DEVICE = Path("/dev/nvidiactl")
EVERYWHERE = "0.0.0.0"
LOOK_S = 1.0
BEAT_S = 10.0
"""Seconds between two entries in rl.engine.servers_dir."""
QUICK_S = 60.0
"""A server that exits sooner than this after its start counts as failed to start."""
MAX_QUICK_ENDS = 5
"""Number of consecutive failed starts after which to give up on a server."""
GROUPS: Mapping[str, re.Pattern[str]] = {
    "norms": re.compile("norm"),
    "embedding": re.compile(r"^embedding\."),
    "head": re.compile(r"^output_layer\."),
    "router": re.compile(r"\.router\."),
    "shared experts": re.compile(r"\.shared_experts\."),
    "experts": re.compile(r"\.experts\."),
    "attention": re.compile(r"\.self_attention\."),
    "mlp": re.compile(r"\.mlp\."),
}
"""Groups of weights by the keys of Megatron's tensors; the first match counts."""
TIMEOUT_S = 120.0
NUDGE = 1.01
"""Factor on a group's weights to measure the probe's sensitivity to it, without an older checkpoint."""


class StopRequested(Exception):  # noqa: N818  # no error
    """SIGTERM or SIGINT has arrived."""


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0 then, or 1 after giving up on a server."""
    config = load_run_config(RlRunConfig, Path(args.config), args.overrides)
    engine = config.served
    if engine is None:
        raise ConfigError(
            f'rl.engine.kind="{config.rl.engine.kind}" has no servers. Set rl.engine.kind="vllm" or "sglang".'
        )
    on_gpu = config.platform.device == "cuda" or (config.platform.device == "auto" and GPU_DEVICE.exists())
    folder, size = server_process.servers_folder(config.run_dir), engine.tensor_parallel
    # Servers on several machines share the folder, and each writes its own files there.
    of_host = folder / socket.gethostname()
    command = partial(server_process.server_command, config, of_host, host=EVERYWHERE, on_gpu=on_gpu)
    servers: list[server_process.ServerProcess] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        for index in range(args.count):
            port = args.port + index
            servers.append(
                server_process.ServerProcess(
                    command,
                    folder / f"{of_host.name}_{port}.log",
                    devices=range(index * size, (index + 1) * size) if on_gpu else (),
                    port=port,
                )
            )
            _write(f"{servers[-1].url}: started, its output is in {servers[-1].log}")
        return _watch(folder, servers, engine.servers_dir)
    except StopRequested:
        return 0
    finally:
        # First: no run sends them further requests, and what they have in progress is asked of others.
        for server in servers:
            if engine.servers_dir is not None:
                server_process.registration(engine.servers_dir, _address(server)).unlink(missing_ok=True)
        for server in servers:
            server.close()


def _address(server: server_process.ServerProcess) -> str:
    return f"http://{socket.gethostname()}:{server.url.rsplit(':', 1)[1]}"


def _watch(folder: Path, servers: list[server_process.ServerProcess], servers_dir: str | None) -> int:
    quick_ends = dict.fromkeys(range(len(servers)), 0)
    since_s, beat_s = time.time(), -BEAT_S
    while True:
        time.sleep(LOOK_S)
        if servers_dir is not None and time.monotonic() > beat_s + BEAT_S:
            beat_s = time.monotonic()
            for server in servers:
                server_process.register(servers_dir, _address(server))
        for index, server in enumerate(servers):
            request = server_process.replacement_request(folder, _address(server))
            if not server.is_alive:
                quick_ends[index] = quick_ends[index] + 1 if server.age_s < QUICK_S else 1
                if quick_ends[index] >= MAX_QUICK_ENDS:
                    _write(f"{server.url} {server.ending()}")
                    return 1
                reason = "it has ended"
            elif request.exists() and request.stat().st_mtime > since_s:
                reason = f"the training asks for it ({request.read_text(encoding='utf-8').strip()})"
                request.unlink(missing_ok=True)
            else:
                continue
            server.restart()
            _write(f"{server.url}: started anew, as {reason}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopRequested


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLine:
    """A group of weights that is replaced by other weights in the checkpoint's model."""

    name: str
    moved: ProbeDifference
    """Difference of the model with the replaced group from the checkpoint's: the probe's sensitivity to it."""
    server: ProbeDifference
    """Difference between the server and the model with the replaced group."""


def probe(args: argparse.Namespace) -> int:
    """Print the differences and return the exit status: 0 if the server has the checkpoint's weights, otherwise 1."""
    with rank_guard():
        trained = read_run(args.run)
        if trained.model.head == "score":
            raise ConfigError(f"{args.run} is a run of a reward model, which has no logits. Name a run of a policy.")
        engine = SERVED[args.kind](
            urls=(args.url,),
            api_key_env=args.api_key_env,
            ca_file=args.ca_file,
            request_timeout_s=TIMEOUT_S,
            update_timeout_s=TIMEOUT_S,
        )
        server = server_apis(engine, trained.model)(args.url)
        checkpoint = find_checkpoint(args.checkpoint or args.run)
        steps = [path_of_step(checkpoint.parent, step) for step in saved_steps(checkpoint.parent)]
        before = steps[: steps.index(checkpoint)] if checkpoint in steps else []
        older = args.older or (before[-1] if before else None)
        plain = {"recompute": "none", "layers": "torch", "fp8": "none", "bf16_products": False}
        settings = trained.platform.model_copy(update=plain)
        platform = platforms.start(settings)
        mesh = build_mesh(MeshConfig())
        seed_ranks(0)
        lora = stored_lora(checkpoint)
        chunks, _ = load_model(trained.model, lora, mesh, platform, settings, checkpoint)
        probe = Probe(chunks, mesh, trained.model, args.dtype, in_fp8=args.weights == "fp8_block")
        ours = probe.reference(args.tolerance)
        theirs = [server.prompt_logprobs(tokens) for tokens in probe.sequences]
        found = ours.difference(theirs)
        replaced = None
        if older is not None:
            others, _ = load_model(trained.model, lora, mesh, platform, settings, older)
            replaced = [shard.data for shard in local_shards(others)]
        keys, lines = [shard.key for shard in local_shards(chunks)], []
        for name in dict.fromkeys(map(_group_of, keys)):
            chosen = [index for index, key in enumerate(keys) if _group_of(key) == name]
            with _replaced(chunks, chosen, replaced):
                other_NT = probe.logprobs()
            moved = difference_of(ours.logprobs_NT, other_NT)
            lines.append(GroupLine(name=name, moved=moved, server=difference_of(other_NT, theirs)))
        sys.stdout.write(_text(args.url, checkpoint, older, ours, found, lines, probe))
        platforms.stop()
    return 0 if ours.limit.holds(found) else 1


def _group_of(key: str) -> str:
    return next((name for name, pattern in GROUPS.items() if pattern.search(key)), "others")


@contextmanager
def _replaced(chunks: Sequence[nn.Module], chosen: Sequence[int], replaced: Sequence[Tensor] | None) -> Iterator[None]:
    shards = list(local_shards(chunks))
    kept = {index: shards[index].data.detach().clone() for index in chosen}
    for index in chosen:
        weights = shards[index].data.detach()
        weights.copy_(weights * NUDGE if replaced is None else replaced[index])
    try:
        yield
    finally:
        for index in chosen:
            shards[index].data.detach().copy_(kept[index])


def _text(
    url: str,
    checkpoint: Path,
    older: Path | None,
    ours: ProbeReference,
    found: ProbeDifference,
    lines: Sequence[GroupLine],
    probe: Probe,
) -> str:
    limit = ours.limit
    number = {"largest": "at most", "mean": "in the mean"}[limit.statistic]
    excess = limit.excess(found)
    sound = "has these weights" if limit.statistic == "largest" else "has these weights up to rounding"
    verdict = sound if excess is None else "does NOT have these weights"
    other = f"of {older}" if older else f"times {NUDGE}"
    expert = found.expert
    of_experts = []
    if ours.experts_NTLK is not None and expert is None:
        of_experts = ["no expert has tokens enough to be compared with the others"]
    elif ours.experts_NTLK is not None and expert is not None:
        is_apart = "it is another one on the server" if expert.is_apart else "as rounding does"
        of_experts = [
            f"the expert that stands out most is {expert.expert} of layer {expert.layer}: its tokens differ by "
            f"{expert.ratio:.2f} times as much as the others, {expert.errors:.1f} standard errors; {is_apart}"
        ]
    text = [
        f"{url} {verdict}: {checkpoint}",
        f"logprobs of {len(probe.sequences)} sequences differ by {found.largest:.2e} at most, {found.mean:.2e} in the "
        f"mean; the limit is {limit.limit:.1e} {number}",
        *of_experts,
        "",
        f"With one group of weights {other} instead, logprobs",
        f"{'group':<16}{'change by':>12}{'then differ from the server by':>34}",
    ]
    for line in lines:
        note = ""
        if limit.of(line.moved) < limit.limit:
            note = "  less than the limit: such a change is not seen"
        elif excess is not None and limit.of(line.server) < limit.limit:
            note = "  <- this is what the server has"
        text.append(f"{line.name:<16}{limit.of(line.moved):>12.2e}{limit.of(line.server):>34.2e}{note}")
    if probe.num_unreached:
        few = "no sequence" if limit.statistic == "largest" else f"fewer than {FEWEST_EXPERT_TOKENS} tokens"
        text.append(f"{probe.num_unreached} experts are reached by {few}: what they alone lack is not seen")
    return "\n".join(text) + "\n"
