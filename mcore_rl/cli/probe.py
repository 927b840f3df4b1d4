"""`mcore-rl probe`: check whether a server has a checkpoint's weights, and which part of them it lacks."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from mcore_rl.cli.loaded_model import load_model
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.engine import SERVED
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.model.global_tensors import local_shards
from mcore_rl.rl.engines.probe import (
    FEWEST_EXPERT_TOKENS,
    Probe,
    ProbeDifference,
    ProbeReference,
    difference_of,
)
from mcore_rl.rl.engines.server_api import ServerApi, server_apis
from mcore_rl.storage.checkpoint import find_checkpoint, path_of_step, saved_steps
from mcore_rl.storage.folders import read_run, stored_lora
from mcore_rl.workers.rank_guard import rank_guard

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLine:
    """A group of weights that is replaced by other weights in the checkpoint's model."""

    name: str
    moved: ProbeDifference
    """Difference between the model with the replaced group and the checkpoint's: the probe's sensitivity to the
    group.
    """
    server: ProbeDifference
    """Difference between the server and the model with the replaced group."""


def main(args: argparse.Namespace) -> int:
    """Print the differences and return the exit status: 0 if the server has the checkpoint's weights, otherwise 1."""
    with rank_guard():
        trained = read_run(args.run)
        if trained.model.head == "score":
            raise ConfigError(
                f"{args.run} is a run of a reward model, which has no logits. Name a run of a policy."
            )
        server = _server(args, trained.model)
        checkpoint = find_checkpoint(args.checkpoint or args.run)
        older = args.older or _checkpoint_before(checkpoint)
        plain = {"recompute": "none", "layers": "torch", "fp8": "none", "bf16_products": False}
        settings = trained.platform.model_copy(update=plain)
        platform = platforms.start(settings)
        mesh = build_mesh(MeshConfig())
        seed_ranks(0)
        lora = stored_lora(checkpoint)
        chunks, _ = load_model(trained.model, lora, mesh, platform, settings, checkpoint)
        probe = Probe(chunks, mesh, trained.model, args.dtype)
        ours = probe.reference(args.tolerance)
        theirs = [server.prompt_logprobs(tokens) for tokens in probe.sequences]
        found = ours.difference(theirs)
        replaced = None if older is None else _weights(older, trained.model, lora, mesh, platform, settings)
        lines = list(_groups(chunks, probe, ours.logprobs_NT, theirs, replaced))
        sys.stdout.write(_text(args.url, checkpoint, older, ours, found, lines, probe))
        platforms.stop()
    return 0 if ours.limit.holds(found) else 1


def _server(args: argparse.Namespace, model: ModelConfig) -> ServerApi:
    engine = SERVED[args.kind](
        urls=(args.url,),
        api_key_env=args.api_key_env,
        ca_file=args.ca_file,
        request_timeout_s=TIMEOUT_S,
        update_timeout_s=TIMEOUT_S,
    )
    return server_apis(engine, model)(args.url)


def _checkpoint_before(checkpoint: Path) -> Path | None:
    """Return the previous checkpoint of the same run, if any."""
    steps = [path_of_step(checkpoint.parent, step) for step in saved_steps(checkpoint.parent)]
    before = steps[: steps.index(checkpoint)] if checkpoint in steps else []
    return before[-1] if before else None


def _weights(
    checkpoint: Path,
    model: ModelConfig,
    lora: LoraConfig,
    mesh: Mesh,
    platform: platforms.Platform,
    settings: PlatformConfig,
) -> list[Tensor]:
    """Return the weights of another checkpoint of the same model, in the order of its shards."""
    chunks, _ = load_model(model, lora, mesh, platform, settings, checkpoint)
    return [shard.data for shard in local_shards(chunks)]


def _groups(
    chunks: Sequence[nn.Module],
    probe: Probe,
    ours_NT: Tensor,
    theirs: Sequence[Sequence[float]],
    replaced: Sequence[Tensor] | None,
) -> Iterator[GroupLine]:
    """Yield a line for each group that the model has, with its weights `replaced` or nudged."""
    keys = [shard.key for shard in local_shards(chunks)]
    for name in dict.fromkeys(_group_of(key) for key in keys):
        chosen = [index for index, key in enumerate(keys) if _group_of(key) == name]
        with _replaced(chunks, chosen, replaced):
            other_NT = probe.logprobs()
        yield GroupLine(
            name=name, moved=difference_of(ours_NT, other_NT), server=difference_of(other_NT, theirs)
        )


def _group_of(key: str) -> str:
    return next((name for name, pattern in GROUPS.items() if pattern.search(key)), "others")


@contextmanager
def _replaced(
    chunks: Sequence[nn.Module], chosen: Sequence[int], replaced: Sequence[Tensor] | None
) -> Iterator[None]:
    """Context with other weights in the shards with indices `chosen`."""
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
    """Return the printed lines."""
    limit = ours.limit
    number = {"largest": "at most", "mean": "in the mean"}[limit.statistic]
    excess = limit.excess(found)
    sound = "has these weights" if limit.statistic == "largest" else "has these weights up to rounding"
    verdict = sound if excess is None else "does NOT have these weights"
    other = f"of {older}" if older else f"times {NUDGE}"
    text = [
        f"{url} {verdict}: {checkpoint}",
        f"logprobs of {len(probe.sequences)} sequences differ by {found.largest:.2e} at most, {found.mean:.2e} in the "
        f"mean; the limit is {limit.limit:.1e} {number}",
        *_expert_lines(found, is_shown=ours.experts_NTLK is not None),
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


def _expert_lines(found: ProbeDifference, *, is_shown: bool) -> list[str]:
    """Return the line about the expert that stands out most, if experts are compared."""
    expert = found.expert
    if not is_shown:
        return []
    if expert is None:
        return ["no expert has tokens enough to be compared with the others"]
    is_apart = "it is another one on the server" if expert.is_apart else "as rounding does"
    return [
        f"the expert that stands out most is {expert.expert} of layer {expert.layer}: its tokens differ by "
        f"{expert.ratio:.2f} times as much as the others, {expert.errors:.1f} standard errors; {is_apart}"
    ]
