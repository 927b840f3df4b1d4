"""The meshes that divide a model, with micro-batches and recomputation: what a search tries."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.families import family_of
from mcore_rl.planning.training import Training

MAX_STAGES, MAX_CHUNKS, MAX_CP = 64, 12, 16
MICRO_BATCHES = (1, 2, 4)
LONG_SEQUENCE = 8192
"""Tokens of a sequence from which context parallelism is tried."""
MESH_FIELDS = ("tp", "pp", "vpp", "ep", "cp", "first_stage_layers", "last_stage_layers", "pp_layout", "dp")
"""Fields of `mesh` that a search changes."""


@dataclass(frozen=True, slots=True)
class Way:
    """How activations are kept: micro-batch and recomputation."""

    micro_batch: int
    recompute: str
    modules: tuple[str, ...]

    def of(self, training: Training, mesh: MeshConfig) -> Training:
        """Return the training on a mesh, with activations kept in this way."""
        platform: dict[str, Any] = {"recompute": self.recompute}
        if self.modules:
            platform["recompute_modules"] = self.modules
        return replace(
            training,
            mesh=mesh,
            micro_batch=self.micro_batch,
            platform=training.platform.model_copy(update=platform),
        )


def meshes(training: Training, ranks_per_node: int) -> Iterator[MeshConfig]:
    """Yield every mesh on which sizes divide; the checks of the program decide about the rest.

    Tensor parallelism stays inside a node. All other fields of `mesh` are taken from the training, and dp is the rest.
    """
    base, model, world_size = training.mesh, training.model, training.world_size
    stages = [pp for pp in _divisors(world_size) if pp <= min(model.num_layers, MAX_STAGES)]
    for pp in stages:
        for tp in _divisors(ranks_per_node):
            if (world_size // pp) % tp or model.num_heads % tp:
                continue
            for cp in _context_parallel(world_size // (pp * tp), tp, training.seq_length, base.cp):
                for ep in _expert_parallel(model, world_size // pp, base.etp):
                    for vpp in range(1, MAX_CHUNKS + 1) if pp > 1 else (1,):
                        for first, last, layout in _stages(model, pp, vpp):
                            yield base.model_copy(
                                update={
                                    "tp": tp,
                                    "pp": pp,
                                    "vpp": vpp,
                                    "ep": ep,
                                    "cp": cp,
                                    "dp": "auto",
                                    "first_stage_layers": first,
                                    "last_stage_layers": last,
                                    "pp_layout": layout,
                                }
                            )


def ways_to_keep(training: Training) -> list[Way]:
    """Return micro-batches and kinds of recomputation to try, in order of decreasing kept activations."""
    has_fp8 = training.platform.fp8 != "none"
    kinds = [("none", ()), *_selective(training.model, fp8=has_fp8), ("full", ())]
    micro = MICRO_BATCHES if training.rollouts is None else (1,)
    return [Way(size, kind, modules) for size in micro for kind, modules in kinds]


def relaxed(training: Training) -> Iterator[Training]:
    """Yield the training with further tensors in main memory that are on the device and may wait: the routes of replay
    first, which cost little, then the state of the optimizer, then both.
    """
    routes, rollouts = None, training.rollouts
    if rollouts is not None and training.model.is_moe and rollouts.route_store == "device":
        routes = replace(training, rollouts=replace(rollouts, route_store="pinned"))
        yield routes
    if training.optim.offload_fraction or training.platform.precision != "bf16":
        return
    for choice in (training, routes):
        if choice is not None:
            yield _offloaded(choice)


def _offloaded(training: Training) -> Training:
    models = [
        replace(model, optim=model.optim.model_copy(update={"offload_fraction": 1.0}))
        if model.optim
        else model
        for model in training.models
    ]
    return replace(training, models=tuple(models))


def configured(config: RunConfig, training: Training) -> RunConfig:
    """Return the config with all fields that a search changes as the training has them."""
    update: dict[str, Any] = {
        "mesh": training.mesh,
        "platform": training.platform,
        "train": config.train.model_copy(update={"micro_batch": training.micro_batch}),
        "optim": training.optim,
    }
    if isinstance(config, RlRunConfig) and training.rollouts is not None:
        update["replay"] = config.replay.model_copy(update={"store": training.rollouts.route_store})
        if config.critic is not None and training.critic is not None:
            critic = config.critic.model_copy(update={"optim": training.critic.optim})
            advantage = config.rl.advantage.model_copy(update={"critic": critic})
            update["rl"] = config.rl.model_copy(update={"advantage": advantage})
    return config.model_copy(update=update)


def changed_fields(old: Training, new: Training) -> dict[str, Any]:
    """Return the fields of a config that a search changes and that differ between two trainings."""
    before, after = _fields(old), _fields(new)
    if new.platform.recompute != "selective":
        del after["platform.recompute_modules"]
    return {key: value for key, value in after.items() if value != before[key]}


def _fields(training: Training) -> dict[str, Any]:
    """Return all fields of a config that a search changes."""
    fields = {f"mesh.{name}": getattr(training.mesh, name) for name in MESH_FIELDS}
    fields |= {
        "platform.recompute": training.platform.recompute,
        "platform.recompute_modules": training.platform.recompute_modules,
        "train.micro_batch": training.micro_batch,
        "optim.offload_fraction": training.optim.offload_fraction,
    }
    if training.critic is not None and training.critic.optim is not None:
        fields["rl.advantage.critic.optim.offload_fraction"] = training.critic.optim.offload_fraction
    if training.rollouts is not None:
        fields["replay.store"] = training.rollouts.route_store
    return fields


def toml_lines(fields: dict[str, Any]) -> list[str]:
    """Return fields as lines of TOML, which a command line takes too."""
    return [f"{key}={toml_value(value)}" for key, value in fields.items()]


def _selective(model: ModelConfig, *, fp8: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    # In 8 bits, norms and activations of experts can be recomputed only with some recipes and from TransformerEngine
    # 2.6 on, which a plan does not know.
    light = () if fp8 else ("layernorm",)
    if family_of(model).is_latent:
        yield "selective", ("mla_up_proj", *light)
        light = ("mla_up_proj", *light)
    if model.is_moe:
        if not fp8:
            yield "selective", ("moe_act", *light)
        yield "selective", ("moe", *light)
    elif light:
        yield "selective", ("mlp", *light)


def _context_parallel(ranks: int, tp: int, seq_length: int, configured: int) -> Iterator[int]:
    for cp in _divisors(ranks):
        wanted = cp == 1 or cp == configured or (seq_length >= LONG_SEQUENCE and cp <= MAX_CP)
        if wanted and (cp == 1 or seq_length % (2 * cp * tp) == 0):
            yield cp


def _expert_parallel(model: ModelConfig, ranks: int, etp: int) -> Iterator[int]:
    if not model.is_moe:
        yield 1
        return
    for ep in _divisors(model.moe.num_experts):
        if ranks % (ep * etp) == 0:
            yield ep


def _stages(
    model: ModelConfig, pp: int, vpp: int
) -> Iterator[tuple[int | None, int | None, Literal["balanced"] | None]]:
    """Yield layers of first and last stage, and a layout of the chunks.

    All stages are equal if the layers divide; else the first and last have fewer. Chunks are balanced if layers divide
    together with embedding, output and the multi-token-prediction layers.
    """
    layers = model.num_layers
    if layers % (pp * vpp) == 0:
        yield None, None, None
    if pp == 1:
        return
    if (layers + 2 + model.mtp_layers) % (pp * vpp) == 0:
        chunks = MeshConfig(pp=pp, vpp=vpp, pp_layout="balanced").chunk_layers(layers, model.mtp_layers)
        if min(chunks[:-1]) > 0 and chunks[-1] >= 0:
            yield None, None, "balanced"
    if layers % (pp * vpp) == 0:
        return
    each = -(-layers // pp)
    each += -each % vpp
    lacking = each * pp - layers
    # Embedding and output are work of the ends: the last stage, which has the loss, has as few layers as the first or
    # fewer.
    for less in sorted({lacking // 2, 0}):
        first, last = each - less, each - (lacking - less)
        if first > 0 and last > 0 and first % vpp == 0 and last % vpp == 0 and pp > 2:
            yield (None if first == each else first), last, None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
