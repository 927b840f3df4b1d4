"""TRL's side of `bench.rl`: its GRPOTrainer, whose steps wait for their turn. Run by the Python that has TRL.

    python -m bench.rl_trl peer.json            as bench.rl_folder wrote it

A step is one rollout and its updates. Settings are TRL's fastest here: fp32, one thread, grouped experts, no
checkpoints, no reports, old logprobs by its own rule.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
os.environ.update(HF_DATASETS_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")
warnings.filterwarnings("ignore")

from bench.turns import Turns

TURNS = Turns()  # before the imports below, which may print

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class OverError(Exception):
    """No more turns."""


class InTurns(TrainerCallback):  # type: ignore[misc]
    """Waits at the beginning of each rollout's first update."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called before each update."""
        if state.global_step % self._updates == 0 and not TURNS.next_step():
            raise OverError


def reward(prompts: list[str], completions: list[str], answer: list[str], **facts: Any) -> list[float]:
    """Score a text as `positions` of mcore_rl does: 1 when exact, else half the share of right characters."""
    scores = [score(*pair) for pair in zip(completions, answer, strict=True)]
    lengths = [len(ids) for ids in facts["completion_ids"]]
    TURNS.add("completions", len(lengths))
    TURNS.add("completion_tokens", sum(lengths))
    TURNS.add("tokens", sum(lengths) + sum(facts["prompt_tokens"]))
    TURNS.add("solved", sum(value == 1.0 for value in scores))
    return scores


def score(given: str, wanted: str) -> float:
    """Score one completion."""
    given = given.strip()
    if given == wanted:
        return 1.0
    right = sum(one == other for one, other in zip(given, wanted, strict=False))
    return 0.5 * right / max(len(given), len(wanted))


def trainer_of(peer: dict[str, Any]) -> GRPOTrainer:
    """The trainer with mcore_rl's settings."""
    rows = [json.loads(line) for line in Path(peer["prompts"]).read_text().splitlines()]
    completions = peer["prompts_per_step"] * peer["group_size"]
    updates = completions // peer["update_size"]
    arguments = GRPOConfig(
        output_dir=str(Path(peer["prompts"]).parent / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=peer["update_size"],
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=peer["group_size"],
        num_iterations=1,
        max_steps=1_000_000,  # until there is no more turn
        max_completion_length=peer["max_new_tokens"],
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        importance_sampling_level="sequence" if peer["kind"] == "gspo" else "token",
        epsilon=peer["clip_low"],
        epsilon_high=peer["clip_high"],
        learning_rate=peer["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=peer["warmup_updates"],
        adam_beta2=peer["beta2"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=10_000,
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(peer["tokenizer"], padding_side="left")
    for row in rows:
        row["prompt_tokens"] = len(tokenizer(row["prompt"])["input_ids"])
    experts = {"experts_implementation": peer["experts"]} if peer["experts"] else {}
    model = AutoModelForCausalLM.from_pretrained(peer["model"], dtype=torch.float32, **experts)
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[InTurns(updates)],
    )


def main() -> None:
    """Train in turns."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sys.stderr.write(f"trl {trl.__version__}, transformers {transformers.__version__}\n")
    trainer = trainer_of(json.loads(Path(sys.argv[1]).read_text()))
    trainer._generate = TURNS.timed("rollout_s", trainer._generate)
    both = TURNS.timed("rollout_and_scoring_s", trainer._generate_and_score_completions)
    trainer._generate_and_score_completions = both
    try:
        trainer.train()
    except OverError:
        return


if __name__ == "__main__":
    main()
