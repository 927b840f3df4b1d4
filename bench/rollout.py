"""Generated tokens per CPU second beside transformers' `generate`: same Qwen3-MoE, same weights, one thread, fp32.

    python -m bench.rollout                completions of ragged and of equal length; results/rollout.json

Eight layers, hidden 256, 16 experts of width 256, 4 a token, vocabulary 8192; prompts of 8 to 24 tokens, a group of 8
completions each, drawn at temperature 1; 32 rows at a time. Ragged completions end at one of VOCAB / 48 tokens, or
after 160: transformers' rows wait for the longest of their batch, the engine's are replaced. Its logprobs count as
work of the engine only. The two take turns; figures are medians over the rounds of CPU seconds of this process.
"""

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; a thread each on a shared machine

import torch
from torch import nn

from bench.clock import Clock, Peaks, circumstances, circumstances_line, contention, ratio_over_rounds, write_results
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.types import Problem, Prompt
from tests.hf_weights import to_global

VOCAB, ROWS, GROUP = 8192, 32, 8
MODEL = ModelConfig(
    family="qwen3_moe", num_layers=8, vocab_size=VOCAB, moe=MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=256)
)
WORKLOADS = {
    "ragged": Sampling(max_new_tokens=160, stop_tokens=frozenset(range(0, VOCAB, 48))),
    "equal": Sampling(max_new_tokens=48),
}
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
RESULTS = Path(__file__).parent / "results" / "rollout.json"


@dataclass
class Measured:
    """Results of one of the two, by round."""

    clock: Clock = field(default_factory=Clock)
    tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_cpu_s(self) -> list[float]:
        """Tokens per CPU second of each round."""
        return [count / s for count, s in zip(self.tokens, self.clock.cpu_s, strict=True)]


def peer_model() -> Any:
    """transformers' model with its own random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=MODEL.hidden_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim,
        num_experts=MODEL.moe.num_experts,
        num_experts_per_tok=MODEL.moe.top_k,
        moe_intermediate_size=MODEL.moe.ffn_hidden_size,
        norm_topk_prob=MODEL.moe.normalize_top_k,
        rms_norm_eps=MODEL.norm_eps,
        rope_theta=MODEL.rope.theta,
        max_position_embeddings=MODEL.max_position,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config).eval()


def our_engine(peer: nn.Module) -> MegatronEngine:
    """The engine on the same weights."""
    settings = PlatformConfig()
    platform, mesh = start(settings), build_mesh(MeshConfig())
    seed_ranks(1)
    chunks = build_model(MODEL, mesh, platform, settings)
    copy_in(chunks, to_global(peer.state_dict(), MODEL))
    return MegatronEngine(chunks, mesh, MODEL, lambda tokens: "", NativeConfig(slots=ROWS))


def prompts_of(round_number: int, count: int) -> list[Prompt]:
    """Return prompts of 8 to 24 random tokens."""
    generator = torch.Generator().manual_seed(round_number)
    lengths = torch.randint(8, 25, (count,), generator=generator).tolist()
    return [
        Prompt(
            problem=Problem(problem_id=str(place), prompt="", answer=""),
            tokens_T=tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()),
        )
        for place, length in enumerate(lengths)
    ]


def transformers_tokens(peer: Any, prompts: list[Prompt], sampling: Sampling) -> int:
    """Count the tokens that `generate` makes before each row's end, prompts padded from the left, ROWS at a time."""
    stops = sorted(sampling.stop_tokens)
    made = 0
    for begin in range(0, len(prompts), ROWS // GROUP):
        batch = [prompt.tokens_T for prompt in prompts[begin : begin + ROWS // GROUP] for _ in range(GROUP)]
        width = max(map(len, batch))
        ids_BS = torch.tensor([[0] * (width - len(row)) + list(row) for row in batch])
        mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        output_BS = peer.generate(
            ids_BS,
            attention_mask=mask_BS,
            do_sample=True,
            top_k=0,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=0,
        )[:, width:]
        ended_BS = torch.isin(output_BS, torch.tensor(stops, dtype=torch.int64))
        before_BS = ended_BS.int().cumsum(1) - ended_BS.int()
        made += int((before_BS == 0).sum())
    return made


def engine_tokens(engine: MegatronEngine, prompts: list[Prompt], sampling: Sampling, seed: int) -> int:
    """Count the tokens that the engine makes."""
    seeds_PG = [range(seed + GROUP * place, seed + GROUP * (place + 1)) for place in range(len(prompts))]
    groups = engine.generate(prompts, sampling, seeds_PG)
    return sum(len(completion.tokens_T) for group in groups for completion in group.completions)


def compare(sampling: Sampling, peer: Any, engine: MegatronEngine, rounds: int, count: int) -> dict[str, Any]:
    """A row of the table."""
    screened = {}
    for name in IMPLEMENTATIONS:
        peer.set_experts_implementation(name)
        short = Sampling(max_new_tokens=8)
        transformers_tokens(peer, prompts_of(0, ROWS // GROUP), short)
        clock = Clock()
        with clock:
            made = transformers_tokens(peer, prompts_of(0, ROWS // GROUP), short)
        screened[name] = made / clock.median_s
    best = max(screened, key=lambda name: screened[name])
    peer.set_experts_implementation(best)
    engine_tokens(engine, prompts_of(0, ROWS // GROUP), Sampling(max_new_tokens=8), 0)
    theirs, ours, peaks = Measured(), Measured(), Peaks()
    for number in range(1, rounds + 1):
        peaks.measure()
        prompts = prompts_of(number, count)
        with theirs.clock:
            theirs.tokens.append(transformers_tokens(peer, prompts, sampling))
        with ours.clock:
            ours.tokens.append(engine_tokens(engine, prompts, sampling, number * 1000))
    return {
        **ratio_over_rounds(ours.tokens_per_cpu_s, theirs.tokens_per_cpu_s),
        "mcore_rl_tokens_per_cpu_s": round(median(ours.tokens_per_cpu_s), 1),
        "transformers_tokens_per_cpu_s": round(median(theirs.tokens_per_cpu_s), 1),
        "transformers_experts": best,
        "tokens": {"mcore_rl": ours.tokens, "transformers": theirs.tokens},
        **circumstances(contention([theirs.clock, ours.clock]), peaks),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="of a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peer = peer_model()
    engine = our_engine(peer)
    rows = {}
    for name, sampling in WORKLOADS.items():
        rows[name] = compare(sampling, peer, engine, arguments.rounds, arguments.prompts)
        print(f"{name} {json.dumps(rows[name])}\n{circumstances_line(rows[name])}", flush=True)
    write_results(RESULTS, {"rows": rows})


if __name__ == "__main__":
    main()
