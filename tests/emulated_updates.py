"""What the matrices of tests/parallel compute, on one rank of an emulated GPU (tests/emulated_gpu.py).

Each function returns what JSON can hold. Weights are in the file `weights.pt` of a folder, from `write_weights`.
"""

from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.step.texts import MixedHead
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, train_step
from tests.emulated_gpu import counted_syncs
from tests.emulated_replay import packed_row
from tests.generating import prompt_of
from tests.parallel import checkpointing, parity, test_ppo, test_preferences, test_rl_updates
from tests.parallel.parity import random_weights
from tests.parallel.replay_faults import Work, effect_of, outcome_of
from tests.parallel.replay_mutants import MUTANTS
from tests.parallel.rl_steps import updates
from tests.parallel.test_ppo import ppo_updates
from tests.parallel.test_replay_mutants import rl_config
from tests.sections import engine_config
from tests.tiny_models import TINY, shallow

MODEL = "qwen3_moe-shallow"
PPO_MODEL = shallow(TINY["qwen3_moe"])
CHANGES: tuple[dict[str, Any], ...] = ({"kind": "grpo", "kl_coeff": 0.1}, {"kind": "gspo"})
LAST_STEP, SAVED_STEP = 4, 2
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "glm_moe_dsa", "qwen3_next", "minimax_m2", "llama")
"""One of each kind: grouped queries, latent attention, sinks, windows and YaRN, indexers, delta nets, a norm over all
heads, no experts."""
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


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


def waits_of_other_heads(folder: str) -> dict[str, dict[str, int]]:
    """How often the host waits, by place, in two steps of DPO with their reference, and in passes over four texts that
    are mixed into updates, in bf16.
    """
    config = test_preferences.config_of(MeshConfig())
    config = config.model_copy(update={"platform": config.platform.model_copy(update={"precision": "bf16"})})
    initial, other = weights_of(folder, "preferences")
    with counted_syncs() as syncs:
        test_preferences.dpo_steps(config, initial, other, test_preferences.LOSSES[:1])
        found = {"preferences": dict(syncs)}
    finish()
    state = _set_up(TINY["qwen3_moe"], "bf16", None)
    texts = [packed_row(row, state) for row in range(4)]
    vocab_size = TINY["qwen3_moe"].vocab_size
    head = MixedHead(Mock(), state.mesh, vocab_size=vocab_size, chunk_tokens=16, weight=1.0)
    with counted_syncs() as syncs:
        run_pass(state.chunks, texts, head, backward=True)
        found["texts"] = dict(syncs)
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


def trained(family: str) -> dict[str, Any]:
    """Losses and gradient norms of two steps, of all weights and of low-rank adapters, sums of the tensors that a push
    sends after them, and tokens of a rollout, in fp32; and in bf16 where the host waited in a step, and how many tokens
    by CUDA graphs are others than without.
    """
    # Indexers share their choices with layers behind them.
    model = TINY[family] if family == "glm_moe_dsa" else shallow(TINY[family])
    found = dict[str, Any]()
    for name, lora in (("all weights", None), ("adapters", LoraConfig(rank=8))):
        state = _set_up(model, "fp32", lora)
        reports = [train_step(state, parity.batch(state, step), NextTokenHead()) for step in range(2)]
        pushed = {
            name: float(tensor.double().abs().sum())
            for bucket in WeightStream(state.chunks, state.mesh, model)
            for name, tensor in bucket.tensors.items()
        }
        found[name] = {"loss": [r.loss for r in reports], "norm": [r.grad_norm for r in reports], "pushed": pushed}
        if lora is None:
            found["tokens"] = _tokens(state, model, cuda_graphs=False)
        finish()
    state = _set_up(model, "bf16", None)
    batch = parity.batch(state, 0)
    with counted_syncs() as syncs:
        train_step(state, batch, NextTokenHead())
        found["waits"] = dict(syncs)
    plain, graphed = (_tokens(state, model, cuda_graphs=way) for way in (False, "auto"))
    found["other tokens by graphs"] = sum(a != b for a, b in zip(plain, graphed, strict=True))
    finish()
    return found


def _set_up(model: ModelConfig, precision: Literal["fp32", "bf16"], lora: LoraConfig | None) -> TrainState:
    settings = PlatformConfig(precision=precision, layers="torch", logits_chunk_tokens=7)
    run = parity.config_of(model, MeshConfig(), settings, lora)
    return set_up(run, platform.start(run.platform))


def _tokens(state: TrainState, model: ModelConfig, *, cuda_graphs: bool | Literal["auto"]) -> list[int]:
    config = engine_config(slots=6, step_tokens=16, cuda_graphs=cuda_graphs)
    engine = MegatronEngine(state.chunks, state.mesh, model, lambda _: "", config, has_fixed_shapes=True)
    prompts = [prompt_of(tokens, str(index)) for index, tokens in enumerate(PROMPTS)]
    groups = engine.generate(prompts, Sampling(max_new_tokens=10, cut=Cut(temperature=0.8)), [[1, 2]] * len(prompts))
    return [token for group in groups for one in group.completions for token in one.tokens_T]


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
