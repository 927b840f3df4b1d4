"""One GRPO step with routing replay on one rank, from its parts: python -m examples.grpo_step

A tiny mixture of experts with random weights learns to write the letters a to m. mcore_rl/rl/trainer.py has all else.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.config.load import load_config
from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.packing import PackingLimits
from mcore_rl.families import allows_te
from mcore_rl.megatron.platform import start, stop
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.rl.batch import BatchTotals, LogprobHead, evaluating, layout_of, make_microbatch
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.rollouts.rollout import sample_seed
from mcore_rl.rl.step.advantages import group_advantages
from mcore_rl.rl.step.learner import PolicyHead
from mcore_rl.rl.step.losses import loss_weights
from mcore_rl.rl.step.objective import group_estimate, policy_objective
from mcore_rl.rl.types import Group, Problem, Prompt, SampleShape, TrainedSample
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import compute_gradients, optimizer_step

SETTINGS = """
model.num_layers=4 model.hidden_size=64 model.num_heads=4 model.num_kv_heads=2 model.head_dim=16 model.vocab_size=26
model.moe.num_experts=8 model.moe.top_k=2 model.moe.ffn_hidden_size=32 optim.lr=1e-3 optim.schedule=constant
train.global_batch=128 train.steps=2 replay.kind=r2 rl.update.epochs=2 rl.update.max_tokens_per_microbatch=2048
rl.rollout.prompts_per_step=8 rl.rollout.group_size=16 rl.rollout.max_new_tokens=12
"""
CONFIG = load_config(RlRunConfig, None, SETTINGS.split())
N = 128  # samples: 16 completions for each of 8 prompts
PROMPTS = [Prompt(problem=Problem(problem_id="", prompt="", answer=""), tokens_T=(p, p)) for p in range(8)]
SEEDS_PG = [[sample_seed(CONFIG.train.seed, p, g) for g in range(16)] for p in range(8)]


def first_half(tokens_T: Sequence[int]) -> float:
    """Return the fraction of letters from a to m, which is the reward; a is token 0."""
    return sum(token < 13 for token in tokens_T) / len(tokens_T)


def sample(state: TrainState) -> tuple[list[Group], Tensor]:
    """Generate a group of completions for each prompt; return them with their rewards, float64 `[prompts, group]`."""
    engine = MegatronEngine(state.chunks, state.mesh, CONFIG.model, str, NativeConfig())
    groups = engine.generate(PROMPTS, Sampling(max_new_tokens=12), SEEDS_PG)
    rewards_PG = [[first_half(completion.tokens_T) for completion in group.completions] for group in groups]
    return groups, torch.tensor(rewards_PG, dtype=torch.float64)


def update(state: TrainState, groups: Sequence[Group], rewards_PG: Tensor) -> None:
    """Record the experts of the old policy in its pass for logprobs, and impose them on two updates (R2)."""
    chunks, mesh, samples = state.chunks, state.mesh, dict[int, TrainedSample]()
    for group in groups:
        for completion in group.completions:
            samples[len(samples)] = TrainedSample(
                tokens_T=torch.tensor(group.prompt.tokens_T + completion.tokens_T),
                rollout_logprobs_C=torch.tensor(completion.logprobs_T),
                shape=SampleShape(
                    replica_rank=0, num_prompt_tokens=2, num_completion_tokens=len(completion.tokens_T), is_trained=True
                ),
            )
    # One packed sequence: each completion after its prompt, and no sample attends to another.
    limits = PackingLimits(max_tokens=2048, multiple=8, sample_multiple=1)
    microbatch = make_microbatch(samples, range(N), limits, mesh.cp, state.platform.device)
    logprobs = LogprobHead(mesh, 26, temperature=1.0, chunk_tokens=2048)
    cache, layouts = RoutingCache(chunks, CONFIG.model, CONFIG.replay), [layout_of(microbatch)]
    with torch.no_grad(), evaluating(chunks), RoutingTape(chunks, mesh, layouts, cache, version=0) as tape:
        [old] = run_pass(chunks, [microbatch], logprobs, backward=False, routing=tape.record())
        tape.finish()
    # All tokens of a completion have its advantage, and all completions the same weight in the mean.
    advantages_N = group_advantages(rewards_PG, group_estimate(CONFIG.rl.advantage)).flatten()
    totals = BatchTotals(num_tokens=12 * N, num_sequences=N)
    weights_N = loss_weights(microbatch.lengths_N, totals, "seq_mean_token_mean", norm_tokens=12)
    microbatch = microbatch.with_advantages({n: advantages_N[n].expand(13) for n in range(N)}, weights_N)
    microbatch = replace(microbatch, old_logprobs_T=old["logprobs"])
    head = PolicyHead(logprobs, mesh, policy_objective(CONFIG.rl.loss))
    for _ in range(2):
        with RoutingTape(chunks, mesh, layouts, cache, version=0) as tape:
            gradients = compute_gradients(state, [microbatch], head, routing=tape.impose())
            tape.finish()
        optimizer_step(state, gradients)


if __name__ == "__main__":
    state = set_up(CONFIG, start(CONFIG.platform, allows_te=allows_te(CONFIG)))
    groups, before_PG = sample(state)
    update(state, groups, before_PG)
    sys.stdout.write(f"mean reward {before_PG.mean():.3f}, after one step {sample(state)[1].mean():.3f}\n")
    stop()
