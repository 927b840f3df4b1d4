"""Helpers that train a little under every fault of routing replay, and compare with training without it."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.model.build import copy_in
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from tests.parallel.parity import MESHES, Tensors, assembled, relative_errors
from tests.parallel.replay_mutants import Mutant, applied
from tests.parallel.replaying import LENGTHS, Case, Run, opened, perturbed, replayed, sample_tokens, tiny
from tests.parallel.rl_steps import updates
from tests.ranks import run_ranks
from tests.tiny_models import shallow

SOME_MESHES = ("1", "tp2-ep2", "cp2", "pp2-vpp2")
REPLAY = {"r3": ReplayConfig(kind="r3"), "r3_left_out": ReplayConfig(kind="r3", missing="live")}
FAULTS_AT_ONCE = 24
TOLERANCE = 1e-6
"""Relative change of a loss or of the norm of a gradient's difference that is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the ranks need to run each scenario."""

    weights: dict[str, Tensors]
    """Weights by mesh."""
    rl: dict[tuple[str, str], RlRunConfig]
    """Config by mesh and scenario."""


def model_of(mesh: str, **moe: Any) -> ModelConfig:
    """The model of a mesh, without the routers' losses."""
    return shallow(tiny("qwen3_moe", **moe), MESHES[mesh])


def trained(jobs: Sequence[tuple[str, str, Mutant | None]], work: Work) -> list[dict[str, Any]]:
    return [outcome_of(mesh, scenario, mutant, work) for mesh, scenario, mutant in jobs]


def outcome_of(mesh: str, scenario: str, mutant: Mutant | None, work: Work) -> dict[str, Any]:
    """Losses and gradients as far as they were computed, and the message of what was raised."""
    found: dict[str, Any] = {"error": "", "is_raw": False}
    with applied(mutant), tempfile.TemporaryDirectory() as folder:
        try:
            if scenario.startswith("rl_"):
                found |= rl_numbers(work, mesh, scenario, Path(folder))
            else:
                found |= replayed_numbers(work, mesh, scenario)
        except RoutingError as error:
            found["error"] = str(error)
        except Exception as error:  # noqa: BLE001  # whatever a fault ends in is its outcome
            found |= {"error": f"{type(error).__name__}: {error}", "is_raw": True}
    destroy_mesh()
    return found


def rl_numbers(work: Work, mesh: str, scenario: str, folder: Path) -> dict[str, Any]:
    """Train on one rollout with a reference, two updates and two epochs."""
    change = {"kind": "grpo", "kl_coeff": 0.1}
    weights = (work.weights[mesh], perturbed(work.weights[mesh]))
    (reports,) = updates(work.rl[mesh, scenario], *weights, folder, [change])
    return {"numbers": [report[name] for report in reports for name in sorted(report)]}


def replayed_numbers(work: Work, mesh: str, scenario: str) -> dict[str, Any]:
    """Record with some weights or take an engine's routes; impose them on others with full recomputation."""
    model = model_of(mesh, **({"capacity_factor": 1.0} if scenario == "drops" else {}))
    replay = REPLAY.get(scenario, ReplayConfig(kind="r2"))
    layouts = ("padded",) if scenario == "padded" else ("packed",)
    case = Case(model="", mesh=MESHES[mesh], recompute="full", layouts=layouts, replay=replay)
    (run,) = opened(case, model)
    if scenario in ("r3", "r3_left_out"):
        take_routes(run, leaves_out=scenario == "r3_left_out")
    else:
        copy_in(run.state.chunks, work.weights[mesh])
        with run.tape() as tape:
            run.evaluate(tape.record())
            tape.finish()
    copy_in(run.state.chunks, perturbed(work.weights[mesh]))
    found = replayed(run, None)
    return {name: found[name] for name in ("losses", "gradients", "error")}


def take_routes(run: Run, *, leaves_out: bool) -> None:
    """Cache routes that no router would choose, of samples that this replica generated: of all tokens, or without those
    of the whole sample 3 and of a third of the others.
    """
    axis, model = run.state.mesh.dp_cp, run.state.config.model
    generated = {}
    for n in range(axis.rank, len(LENGTHS), axis.size):
        generator = torch.Generator().manual_seed(n)
        scores = torch.rand(LENGTHS[n], model.num_layers, model.moe.num_experts, generator=generator)
        tokens_T = sample_tokens(n, model.vocab_size)[: LENGTHS[n]]
        experts_TLK = scores.topk(model.moe.top_k).indices.to(torch.int16)
        if leaves_out:
            experts_TLK[n % 3 :: 3] = -1
            if n == 3:
                experts_TLK[:] = -1
        generated[n] = RolloutRoutes(tokens_T, experts_TLK)
    cache_rollout_routes(run.cache, run.version, generated, run.layouts, run.state.mesh)


@dataclass(frozen=True, slots=True)
class Row:
    mutant: Mutant
    mesh: str
    error: str
    is_raw: bool
    effect: float | None
    """Largest relative change; None: the run ended before there was a number."""

    @property
    def verdict(self) -> str:
        """How the fault ended."""
        if self.error:
            return "raw error" if self.is_raw else "caught"
        return "SILENT" if self.effect is None or self.effect > TOLERANCE else "harmless"


def table(mutants: Sequence[Mutant], work: Work) -> list[Row]:
    """Run faults and their unmutated scenarios, many in one set of ranks."""
    rows = []
    for world in (1, 2):
        meshes = [mesh for mesh in SOME_MESHES if MESHES[mesh].smallest_world == world]
        faults = [(mesh, m) for mesh in meshes for m in mutants if mesh in m.meshes]
        # Those of one scenario together: each set of ranks runs the scenarios of its faults without any.
        faults.sort(key=lambda fault: (meshes.index(fault[0]), fault[1].scenario))
        for begin in range(0, len(faults), FAULTS_AT_ONCE):
            rows += part_of_table(world, faults[begin : begin + FAULTS_AT_ONCE], work)
    return rows


def part_of_table(world: int, faults: Sequence[tuple[str, Mutant]], work: Work) -> list[Row]:
    plain = list(dict.fromkeys((mesh, mutant.scenario) for mesh, mutant in faults))
    jobs: list[tuple[str, str, Mutant | None]] = [(*key, None) for key in plain]
    jobs += [(mesh, mutant.scenario, mutant) for mesh, mutant in faults]
    by_job = list(zip(*run_ranks(trained, world, jobs, work), strict=True))
    references = dict(zip(plain, by_job, strict=False))
    for key, outcome in references.items():
        assert {one["error"] for one in outcome} == {""}, (key, outcome[0]["error"])
    rows = []
    for (mesh, mutant), outcome in zip(faults, by_job[len(plain) :], strict=True):
        errors = {one["error"] for one in outcome}
        is_raw = any(one["is_raw"] for one in outcome)
        assert is_raw or len(errors) == 1, f"{mutant.name}: ranks disagree: {errors}"
        effect = effect_of(outcome, references[mesh, mutant.scenario])
        rows.append(Row(mutant, mesh, max(errors), is_raw, effect))
    return rows


def effect_of(ranks: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float | None:
    """Return the largest relative change of a loss or gradient; None where a rank has none."""
    if all("numbers" in one for one in ranks):
        pairs = zip(ranks[0]["numbers"], reference[0]["numbers"], strict=True)
        return float(max(abs(one - other) / max(abs(other), 1e-2) for one, other in pairs))
    if not all("gradients" in one for one in ranks):
        return None
    losses, expected = ({n: x for one in side for n, x in one["losses"].items()} for side in (ranks, reference))
    gradients = relative_errors(*(assembled([one["gradients"] for one in side]) for side in (ranks, reference)))
    changes = [abs(losses[n] - x) / max(abs(x), 1e-2) for n, x in expected.items()]
    return float(max(*changes, *gradients.values()))
