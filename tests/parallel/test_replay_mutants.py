"""No fault of routing replay that changes a loss or a gradient is silent, on one rank and on several."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.replay import ReplayKind
from mcore_rl.config.rl_run import RlRunConfig
from tests.parallel.parity import MESHES, config_of, random_weights
from tests.parallel.replay_faults import SOME_MESHES, Row, Work, model_of, table
from tests.parallel.replay_mutants import MUTANTS, applied
from tests.parallel.test_rl_updates import config_of as rl_config_of


def rl_config(mesh: str, scenario: str) -> RlRunConfig:
    """Two epochs, so that every update has a pass for old logprobs before it."""
    kind: ReplayKind = "r3" if scenario == "rl_r3" else "r2"
    config = rl_config_of("qwen3_moe", MESHES[mesh], replay=kind, epochs=2)
    reference = "replay" if scenario == "rl_replayed_reference" else "live"
    replay = config.replay.model_copy(update={"reference": reference})
    return config.model_copy(update={"model": model_of(mesh), "replay": replay})


@functools.cache
def work() -> Work:
    scenarios = {(mesh, m.scenario) for m in MUTANTS if m.scenario.startswith("rl_") for mesh in m.meshes}
    return Work(
        weights={mesh: random_weights(config_of(model_of(mesh), MeshConfig())) for mesh in SOME_MESHES},
        rl={(mesh, scenario): rl_config(mesh, scenario) for mesh, scenario in scenarios},
    )


def text_of(rows: list[Row]) -> str:
    lines = [
        f"{row.mutant.name:62} {row.mutant.scenario:22} {row.mesh:9} {row.verdict:9} "
        f"{'-' if row.effect is None else format(row.effect, '.1e'):8} {row.error[:90]}"
        for row in rows
    ]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in sorted({r.verdict for r in rows})}
    return "\n".join([*lines, f"{len({row.mutant.name for row in rows})} faults, {len(rows)} runs: {counts}", ""])


def test_every_fault_finds_its_text() -> None:
    """Whoever changes that line learns here, in a second, that a fault has to be changed with it."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    each_night = (
        f"({len(MUTANTS)} faults on several meshes each night, {sum(m.in_short for m in MUTANTS)} of them on one"
    )
    assert each_night in (Path(__file__).parents[2] / "docs/proofs.md").read_text(encoding="utf-8")
    for mutant in MUTANTS:
        with applied(mutant):
            pass


@pytest.mark.matrix("short")
@pytest.mark.parametrize("which", ["short", "all"])
def test_no_fault_that_moves_a_number_is_silent(which: str) -> None:
    """Every fault of the table is caught by an error that all ranks raise, or changes nothing."""
    # The last mesh of a fault has all that the first has, one rank.
    short = [replace(m, meshes=m.meshes[-1:]) for m in MUTANTS if m.in_short]
    rows = table(short if which == "short" else MUTANTS, work())
    sys.stdout.write("\n" + text_of(rows))
    silent = [row for row in rows if row.verdict == "SILENT"]
    assert not silent, text_of(silent)
    # A raw error may be an assertion of ours, never one of a dispatcher that other ranks wait for.
    raw = [row for row in rows if row.is_raw and not row.error.startswith("AssertionError")]
    assert not raw, text_of(raw)
    doubled = [row for row in rows if row.mutant.name == "an expert twice in every imposed set"]
    assert all("imposed routes name an expert twice" in row.error for row in doubled if row.mesh == "tp2-ep2")
    assert doubled[-1].mesh == "tp2-ep2"
    # One that changes nothing on one rank may be an error where experts lie on several.
    harmless = {row.mutant.name for row in rows if row.verdict == "harmless"}
    assert harmless == {row.mutant.name for row in rows if row.mutant.is_harmless}
