"""A cell of each matrix on an emulated GPU, where the branches run that a CPU does not enter, beside the CPU's numbers.

The devices are emulated (tests/emulated_gpu.py says how far); parity is in
tests/unit/megatron/patches/test_machines.py, packed rows in tests/unit/megatron/test_kernels.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import emulated_updates
from tests.emulated_machine import emulated
from tests.emulated_runs import OF_THE_STEP
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    emulated_updates.write_weights(path)
    return path


def on_gpu(name: str, *arguments: object) -> Any:
    """What a function of tests/emulated_updates.py returns on the emulated GPU."""
    done = emulated("cuda", f"tests.emulated_updates:{name}", *map(str, arguments))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def numbers(found: Any, path: str = "") -> dict[str, float]:
    """All numbers of nested lists and records, by their place."""
    if isinstance(found, int | float):
        return {path: float(found)}
    items = found.items() if isinstance(found, dict) else enumerate(found)
    return {place: number for key, part in items for place, number in numbers(part, f"{path}/{key}").items()}


@pytest.mark.full
@pytest.mark.parametrize("family", emulated_updates.FAMILIES)
def test_a_family_trains_is_pushed_and_generates_as_on_a_cpu(family: str) -> None:
    (here,) = run_ranks(emulated_updates.trained, 1, family)
    there = on_gpu("trained", family)
    assert there["tokens"] == here["tokens"] and len(here["tokens"]) == 60
    assert not there["other tokens by graphs"]
    waiting = {place.partition(":")[2] for place in there["waits"]}
    assert waiting and waiting <= OF_THE_STEP
    for name in ("all weights", "adapters"):
        wanted, found = numbers(here[name]), numbers(there[name])
        assert found.keys() == wanted.keys() and len(wanted) > 20
        # Adam's first steps have the size of the learning rate, 1e-3, whatever rounding did to a tiny gradient.
        for place, number in wanted.items():
            assert found[place] == pytest.approx(number, rel=1e-5), place


@pytest.mark.full
@pytest.mark.parametrize("name", ["policy_updates", "ppo", "preferences"])
def test_updates_are_those_of_a_cpu(name: str, folder: Path) -> None:
    (here,) = run_ranks(getattr(emulated_updates, name), 1, str(folder))
    wanted, found = numbers(here), numbers(on_gpu(name, folder))
    assert found.keys() == wanted.keys() and len(wanted) > 20
    for place, number in wanted.items():
        # Sums that cancel are measured against numbers of size 1; an extreme is a difference of two fp32 logprobs.
        allowed = 4 * 2**-21 if "/max/" in place else 2e-6
        assert found[place] == pytest.approx(number, rel=1e-5, abs=allowed), place


@pytest.mark.full
def test_no_head_of_a_policy_waits_for_the_number_of_its_tokens(folder: Path) -> None:
    places = on_gpu("waits", folder)
    assert places and not [place for place in places if place.startswith(("vocab.py", "batch.py", "learner.py"))]


@pytest.mark.full
def test_preferences_and_texts_in_rl_wait_once_a_step_and_not_for_a_microbatch(folder: Path) -> None:
    found = on_gpu("waits_of_other_heads", folder)
    assert {place.partition(":")[2] for place in found["texts"]} <= OF_THE_STEP
    # The reference's logprobs of all answers are copied to the host at the end, at once.
    assert found["preferences"].pop("preferences.py:answer_logprobs") == 1
    assert {place.partition(":")[2] for place in found["preferences"]} <= OF_THE_STEP


@pytest.mark.full
def test_a_resumed_run_is_bit_equal(folder: Path) -> None:
    found = on_gpu("resumed", folder)
    assert found["resumed"] == found["whole"] and len(found["whole"]) == emulated_updates.LAST_STEP


@pytest.mark.full
def test_no_fault_of_replay_is_silent(folder: Path) -> None:
    found = on_gpu("faults", folder)
    assert len(found) > 5
    silent = [name for name, fault in found.items() if not fault["error"] and (fault["effect"] or 1.0) > 1e-6]
    assert not silent
