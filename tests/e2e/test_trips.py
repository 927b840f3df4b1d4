"""The way of a reader through one rollout batch: the files that a step enters, each with the reason why."""

import re

import pytest

from tests.forked import succeed

STEP = {
    "rl/trainer.py": "the step, in order",
    "rl/step_log.py": "its observer, which logs it",
    # Prompts, completions, rewards.
    "rl/rollouts/rollout.py": "scored groups of the next prompts",
    "rl/rollouts/signal.py": "how many groups have a signal, and warnings where few have",
    "rl/rollouts/prompts.py": "the prompts at the cursor: the recipe's problems are made by a task",
    "data/chat.py": "a problem as a conversation",
    "data/shapes.py": "keys of a turn that are null or empty are absent",
    "data/tokenizer.py": "text to tokens, and back for the reward",
    "rl/types.py": "the records of prompts and completions",
    "rl/engines/base.py": "what an engine is asked, and where completions end",
    "rl/engines/native/engine.py": "completions by the modules that train",
    "rl/engines/native/scheduler.py": "which completions a generating step computes",
    "rl/engines/native/decoder.py": "one generating step",
    "rl/sampling.py": "drawn tokens, their logprobs, seeds",
    "rl/rewards/score.py": "rewards of the completions",
    "rl/workers.py": "reward functions run in processes of their own",
    "megatron/agree.py": "an error of one rank's scores or proofs is raised on all",
    # Microbatches, routes, logprobs, advantages, the update.
    "rl/step/learner.py": "from a rollout to updates, with the parts that the config asks for",
    "rl/batch.py": "completions as packed microbatches, and their logprobs",
    "data/packing.py": "which completions share a packed sequence",
    "model/inputs.py": "a microbatch as the model reads it",
    "megatron/platform.py": "batches go to the device",
    "rl/step/policy_routes.py": "a pass without gradient, and which pass records or imposes routes",
    "replay/witness.py": "the proof that a pass imposed routes, or none",
    "rl/models/reference.py": "the KL penalty has a reference, whose logprobs a pass adds",
    "rl/step/objective.py": "advantages by their kind, and a KL in the reward",
    "rl/step/advantages.py": "rewards to advantages",
    "rl/step/losses.py": "the weight of each token in the loss; the loss, and how far the update went",
    "train/step.py": "one optimizer step, and an end of the run where it reaches no parameter",
    "megatron/schedule.py": "every pass goes through its door",
    "megatron/routers.py": "the routers of a chunk, which a pass gives its sequences",
    "megatron/vocab.py": "logprobs and entropy of sliced logits",
    # The model: what is ours in the place of Megatron's, and what is patched there.
    "model/build.py": "our model around Megatron's",
    "model/layers/attention.py": "attention, over keys and values of earlier positions in a generating step",
    "model/layers/moe.py": "the experts' layer where no token leaves its rank",
    "model/layers/experts.py": "experts",
    "model/layers/linear.py": "the output layer",
    "model/router_load.py": "tokens of each expert, and the balance loss",
    "megatron/patches/router_losses.py": "the recipe has a balance loss, and its routers see padding",
    "megatron/patches/replacements.py": "positions of packed tokens, clipped gradients, collectives of one rank",
    "megatron/patches/standins.py": "a CPU in the place of a GPU, and an Adam in that of apex's",
    # Metrics.
    "planning/flops.py": "FLOPs of the step",
    "train/offload.py": "the reference's weights are copied in, and the policy's back",
    "metrics/performance.py": "seconds of each phase, tokens per second, MFU, memory",
    "metrics/metrics.py": "a metric and its reduction",
    "metrics/sinks.py": "the log",
    "metrics/jsonl.py": "metrics.jsonl",
    "storage/files.py": "metrics.jsonl may have been deleted or moved",
    "metrics/verdict.py": "an alarm where the reward rises and the accuracy falls",
    "errors.py": "control characters of a message are escaped",
}
"""Files that a rollout batch of the plain recipe enters (one rank, routing replay R2, a KL penalty, one update). Before
a line is added: a feature that is off is not entered, and what cannot change during a run is decided where the object
is built that needs it (CONTRIBUTING.md, A step)."""


REPLAYED = {
    "replay/tape.py": "a forward pass with imposed routes, and the proofs of its end",
    "replay/cache.py": "routes of the rollout batch, by sample and position; the memory that they are in",
    "replay/accounts.py": "routes are those recorded, how often each router took them, which changed",
    "replay/router_hooks.py": "a router takes the routes that are imposed on it",
}
"""Files that it also enters where an update imposes the routes of the pass for old logprobs."""
SENT = {
    "replay/from_rollouts.py": "the engine's routes of each completion",
    "replay/exchange.py": "they go to the replica that trains on the completion",
    "replay/disagreement.py": "the trainer's own choices are compared with them",
}
"""Files that it also enters where the routes are the engine's (R3)."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "files"),
    [((), {*STEP}), (("--epochs", "2"), {*STEP, *REPLAYED}), (("--replay", "r3"), {*STEP, *REPLAYED, *SENT})],
)
def test_a_step_enters_these_files_and_none_of_a_feature_that_is_off(words: tuple[str, ...], files: set[str]) -> None:
    done = succeed("bench.trips", ["--list", *words])
    entered = set(re.findall(r"calls  (\S+\.py):", done.stdout))
    assert entered == files
