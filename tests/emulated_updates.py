"""What the matrices of tests/parallel compute, on one rank of an emulated GPU (tests/emulated_gpu.py).

Each function returns what JSON can hold. Weights are in the file `weights.pt` of a folder, from `write_weights`.
"""

from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import destroy_mesh
from tests.emulated_gpu import counted_syncs
from tests.parallel import checkpointing, parity, test_ppo, test_preferences, test_rl_updates
from tests.parallel.parity import random_weights
from tests.parallel.replay_faults import Work, effect_of, outcome_of
from tests.parallel.replay_mutants import MUTANTS
from tests.parallel.rl_steps import updates
from tests.parallel.test_ppo import ppo_updates
from tests.parallel.test_replay_mutants import rl_config
from tests.tiny_models import TINY, shallow

MODEL = "qwen3_moe-shallow"
PPO_MODEL = shallow(TINY["qwen3_moe"])
CHANGES: tuple[dict[str, Any], ...] = ({"kind": "grpo", "kl_coeff": 0.1}, {"kind": "gspo"})
LAST_STEP, SAVED_STEP = 4, 2


def write_weights(folder: Path) -> None:
    """Write the weights that each of the functions below begins with."""
    torch.save(
        {
            "rl": [test_rl_updates.weights(MODEL, seed) for seed in (1, 2)],
            "ppo": list(test_ppo.weights_of(PPO_MODEL)),
            "preferences": [test_preferences.weights(seed) for seed in (1, 2)],
            "faults": random_weights(parity.config_of(rl_config("1", "rl_r2").model, MeshConfig())),
        },
        folder / "weights.pt",
    )


def weights_of(folder: str, name: str) -> Any:
    return torch.load(Path(folder) / "weights.pt", weights_only=True)[name]


def policy_updates(folder: str) -> list[list[dict[str, float]]]:
    """The reports of the updates of one rollout, with replayed routes of the old policy and with the engine's."""
    found = []
    for replay in ("r2", "r3"):
        config = test_rl_updates.config_of(MODEL, MeshConfig(), replay=replay)  # type: ignore[arg-type]
        initial, other = weights_of(folder, "rl")
        found += updates(config, initial, other, scratch(folder, f"policy-{replay}"), CHANGES)
        finish()
    return found


def waits(folder: str) -> dict[str, int]:
    """How often the host waits, by place, in the passes and updates of one rollout in bf16 with the engine's routes."""
    config = test_rl_updates.config_of(MODEL, MeshConfig(), replay="r3")
    config = config.model_copy(update={"platform": config.platform.model_copy(update={"precision": "bf16"})})
    initial, other = weights_of(folder, "rl")
    with counted_syncs() as syncs:
        updates(config, initial, other, scratch(folder, "waits"), CHANGES[:1])
        found = dict(syncs)
    finish()
    return found


def ppo(folder: str) -> list[dict[str, float]]:
    """The reports of the critic's and the policy's updates, and the statistics of the values."""
    config = test_ppo.config_of(PPO_MODEL, replay="r2")
    found = ppo_updates(config, weights_of(folder, "ppo"), scratch(folder, "ppo"))
    finish()
    return [found["values"], *found["critic"], *found["policy"]]


def preferences(folder: str) -> list[list[dict[str, float]]]:
    """The sums, losses and gradient norms of two steps of each loss, and an evaluation."""
    config = test_preferences.config_of(MeshConfig())
    initial, other = weights_of(folder, "preferences")
    _, found = test_preferences.dpo_steps(config, initial, other, test_preferences.LOSSES)
    finish()
    return found


def resumed(folder: str) -> dict[str, list[float]]:
    """The losses of a run of a few steps, and of one that was saved and began again in between."""
    straight = scratch(folder, "straight")
    broken = scratch(folder, "broken")
    model = checkpointing.SMALL
    whole = checkpointing.trained(checkpointing.config_of(straight, model, MeshConfig()), LAST_STEP).losses
    platform.stop()
    config = checkpointing.config_of(broken, model, MeshConfig())
    first = checkpointing.trained(config, SAVED_STEP, [SAVED_STEP]).losses
    platform.stop()
    rest = checkpointing.trained(config, LAST_STEP)
    platform.stop()
    assert rest.source is not None
    return {"whole": list(whole.values()), "resumed": [*first.values(), *rest.losses.values()]}


def faults(folder: str) -> dict[str, dict[str, Any]]:
    """The outcome of each fault of replay that has one rank: the error, or the largest change of a number."""
    scenarios = {m.scenario for m in MUTANTS if m.in_short and "1" in m.meshes}
    rl = {("1", s): rl_config("1", s) for s in scenarios if s.startswith("rl_")}
    work = Work(weights={"1": weights_of(folder, "faults")}, rl=rl)
    plain = {scenario: outcome_of("1", scenario, None, work) for scenario in sorted(scenarios)}
    assert {one["error"] for one in plain.values()} == {""}
    found = {}
    for mutant in MUTANTS:
        if mutant.in_short and "1" in mutant.meshes:
            outcome = outcome_of("1", mutant.scenario, mutant, work)
            effect = effect_of([outcome], [plain[mutant.scenario]])
            found[mutant.name] = {"error": outcome["error"], "effect": effect}
    platform.stop()
    return found


def scratch(folder: str, name: str) -> Path:
    """Return a new folder, beside that of the other machine."""
    path = Path(folder) / f"{name}-{torch.cuda.is_available()}"
    path.mkdir(parents=True)
    return path


def finish() -> None:
    destroy_mesh()
    platform.stop()
