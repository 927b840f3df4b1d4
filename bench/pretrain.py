"""Tokens/s of a training step beside transformers' Qwen3-MoE: same sizes, same weights, same text, one thread.

    python -m bench.pretrain                      all workloads, each in a process of its own
    python -m bench.pretrain --workload experts   one, in this process

A step is forward, loss with load balancing, backward, gradient clipping and AdamW. transformers runs in the fastest of
its implementations of the experts, in fp32 and, unless torch multiplies bf16 more slowly than fp32 here, under bf16
autocast; this package with compiled layers (`platform.layers = "cpu"`), with torch's, and with compiled layers and
`platform.bf16_products`. Steps alternate between them; figures are CPU seconds of this process, medians over the
rounds; the spread of a ratio is that of its rounds, from quartile to quartile. Memory that a step frees stays with the
process, for all alike (--allocator kept): with glibc's own settings (default) models that alternate pay page faults of
each other.
Results go to bench/results/pretrain.json; a row that others on the machine disturbed (contention above 1.3) is marked,
and not to be quoted.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; two threads a process collapse on a shared machine

import torch
from torch import Tensor

from bench.clock import (
    Clock,
    Peaks,
    circumstances,
    circumstances_line,
    contention,
    gflops,
    ratio_over_rounds,
    write_results,
)
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, TrainConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import copy_in
from mcore_rl.model.inputs import localize
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.train.setup import set_up
from mcore_rl.train.step import NextTokenHead, train_step
from tests.hf_weights import to_global

VOCAB, AUX = 512, 1e-3
OPTIM = OptimConfig(lr=1e-3, schedule="constant", weight_decay=0.1, clip_grad=1.0)
FEW_TOKENS, HOPELESS_S = 64, 3.0
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
RESULTS = Path(__file__).parent / "results" / "pretrain.json"
Tensors = dict[str, Tensor]
OURS: dict[str, dict[str, Any]] = {
    "mcore_rl": {"layers": "cpu"},
    "mcore_rl, torch layers": {"layers": "torch"},
    "mcore_rl, bf16 products": {"layers": "cpu", "bf16_products": True},
}
"""Settings of platform."""
AUTOCAST = "transformers, bf16 autocast"
PRODUCT_SIZE, PRODUCT_ROUNDS = 512, 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's names in mallopt."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one row of the table."""

    experts: int
    top_k: int
    length: int
    batch: int
    target: float
    """Ratio that must be reached."""

    @property
    def model(self) -> ModelConfig:
        """Four layers, hidden 256, 8 heads in 4 groups, experts of width 128."""
        moe = MoEConfig(num_experts=self.experts, top_k=self.top_k, ffn_hidden_size=128, aux_loss_coeff=AUX)
        return ModelConfig(family="qwen3_moe", vocab_size=VOCAB, moe=moe)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.length * self.batch


WORKLOADS = {
    "small": Workload(experts=16, top_k=4, length=256, batch=8, target=1.1),
    "experts": Workload(experts=128, top_k=8, length=256, batch=8, target=1.25),
    "experts-top4": Workload(experts=128, top_k=4, length=256, batch=8, target=1.25),
    "long": Workload(experts=16, top_k=4, length=1024, batch=2, target=1.1),
}


class Text:
    """Text that can be learnt: each symbol is followed by one of four, step by step the same for everyone."""

    def __init__(self, workload: Workload) -> None:
        self._shape = workload.batch, workload.length
        self._following = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(7))

    def batch(self, step: int) -> Tensor:
        """`[B, S + 1]`."""
        generator = torch.Generator().manual_seed(10_000 + step)
        rows, length = self._shape
        tokens = torch.empty(rows, length + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(0, VOCAB, (rows,), generator=generator)
        choices = torch.randint(0, 4, (rows, length), generator=generator)
        for place in range(length):
            tokens[:, place + 1] = self._following[tokens[:, place], choices[:, place]]
        return tokens


@dataclass
class Runner:
    """One of the models that are compared."""

    step: Callable[[Tensor], float]
    """Trains on a batch; the mean loss of a token, without the balance loss."""
    clock: Clock
    losses: list[float]

    def run(self, tokens: Tensor) -> None:
        """One timed step."""
        with self.clock:
            loss = self.step(tokens)
        self.losses.append(loss)


def transformers_step(
    implementation: str, workload: Workload, weights: Tensors | None, *, autocasts: bool = False
) -> tuple[Any, Tensors]:
    """The step of a model of transformers with `weights` (None: its own random ones), and its weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes, moe = workload.model, workload.model.moe
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.ffn_hidden_size,
        norm_topk_prob=moe.normalize_top_k,
        rms_norm_eps=sizes.norm_eps,
        rope_theta=sizes.rope.theta,
        max_position_embeddings=sizes.max_position,
        tie_word_embeddings=False,
        router_aux_loss_coef=AUX,
        output_router_logits=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    if weights is not None:
        model.load_state_dict(weights)
    model.set_experts_implementation(implementation)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = OPTIM.beta1, OPTIM.beta2
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIM.lr, betas=betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay, fused=True
    )

    def step(tokens: Tensor) -> float:
        inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16) if autocasts else nullcontext():
            output = model(input_ids=inputs, labels=inputs, shift_labels=labels)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(output.loss.detach() - AUX * output.aux_loss.detach())

    return step, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def our_step(
    workload: Workload, weights: Tensors, settings: Mapping[str, Any] | None = None
) -> Callable[[Tensor], float]:
    """The step of mcore_rl with weights of transformers."""
    from megatron.core import parallel_state  # after the patches

    model = workload.model
    config = PretrainConfig(
        model=model,
        optim=OPTIM,
        train=TrainConfig(global_batch=workload.batch),
        platform=PlatformConfig(**settings or {}),
    )
    parallel_state.destroy_model_parallel()  # Forgets another variant's groups, which live on: it trains on.
    state = set_up(config, start(config.platform))
    copy_in(state.chunks, to_global(weights, model))
    state.optimizer.reload_model_params()
    head = NextTokenHead()

    def step(tokens: Tensor) -> float:
        microbatch = Microbatch(
            tokens_BS=tokens[:, :-1],
            labels_BS=tokens[:, 1:],
            loss_mask_BS=torch.ones(workload.batch, workload.length),
            position_ids_BS=torch.arange(workload.length).expand(workload.batch, -1),
        )
        local = localize(microbatch, state.mesh.cp, state.platform.device)
        return train_step(state, [local], head).loss

    return step


def compare(workload: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """The row of one workload."""
    text, peaks = Text(workload), Peaks()
    peer, weights, screened = fastest_peer(workload, text)
    runners, slowness = {"transformers": peer}, bf16_slowness()
    if slowness < 1:
        best = max(screened, key=screened.__getitem__)
        rounded, _ = transformers_step(best, workload, weights, autocasts=True)
        runners[AUTOCAST] = Runner(rounded, Clock(), [])
    runners |= {name: Runner(our_step(workload, weights, OURS[name]), Clock(), []) for name in OURS}
    number = 0
    for index in range(rounds + 1):
        peaks.measure()
        for runner in runners.values():
            for offset in range(steps):
                runner.run(text.batch(number + offset))
        number += steps
        if index == 0:  # warm-up: memory is laid out, kernels are compiled
            for runner in runners.values():
                runner.clock = Clock()
    return row(workload, runners, peaks, screened) | {"bf16_slowness": round(slowness, 2)}


def bf16_slowness() -> float:
    """CPU seconds of torch's product of bf16 over those of one in fp32: above 1 without an instruction for bf16."""
    operands = {dtype: torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for dtype in (torch.bfloat16, torch.float32)}
    clocks = {dtype: Clock() for dtype in operands}
    for _ in range(PRODUCT_ROUNDS):
        for dtype, operand in operands.items():
            with clocks[dtype]:
                torch.mm(operand, operand)
    return min(clocks[torch.bfloat16].cpu_s) / min(clocks[torch.float32].cpu_s)


def fastest_peer(workload: Workload, text: Text) -> tuple[Runner, Tensors, dict[str, float]]:
    """The fastest implementation of transformers, fresh, its weights, and the tokens/s of each."""
    _, weights = transformers_step(IMPLEMENTATIONS[0], workload, None)
    speeds = {name: screened_speed(name, workload, text, weights) for name in IMPLEMENTATIONS}
    best = max(speeds, key=speeds.__getitem__)
    step, _ = transformers_step(best, workload, weights)
    return Runner(step, Clock(), []), weights, speeds


def screened_speed(name: str, workload: Workload, text: Text, weights: Tensors) -> float:
    """Tokens per CPU second of the best of three steps."""
    step, _ = transformers_step(name, workload, weights)
    runner = Runner(step, Clock(), [])
    for number in range(3):
        tokens = text.batch(number)
        if name == "batched_mm":
            # It copies an expert's weights for each of its tokens: 13 GB for the whole batch, 50 GB of 128 experts.
            tokens = tokens[:1, : FEW_TOKENS + 1]
        runner.run(tokens)
        if runner.clock.cpu_s[0] > HOPELESS_S:
            break
    return tokens[:, 1:].numel() / min(runner.clock.cpu_s)


def row(workload: Workload, runners: dict[str, Runner], peaks: Peaks, screened: dict[str, float]) -> dict[str, Any]:
    """Figures of one workload, for people and machines."""
    flops = workload.tokens * train_flops_per_token(workload.model, workload.length)
    best_peak = peaks.gflops()
    models = {}
    for name, runner in runners.items():
        speed = gflops(runner.clock.median_s, flops)
        models[name] = {
            "tokens_per_cpu_s": round(workload.tokens / runner.clock.median_s, 1),
            "step_cpu_s": round(runner.clock.median_s, 4),
            "step_cpu_s_best": round(min(runner.clock.cpu_s), 4),
            "spread": round(runner.clock.spread, 3),
            "gflops": round(speed, 1),
            "share_of_peak": round(speed / best_peak, 3),
            "losses": [round(loss, 4) for loss in runner.losses],
        }
    peer, ours = runners["transformers"], runners["mcore_rl"]
    peers = [runners[name] for name in ("transformers", AUTOCAST) if name in runners]
    return {
        "workload": asdict(workload),
        **ratio_over_rounds(peer.clock.cpu_s, ours.clock.cpu_s),
        "ratios": {name: round(peer.clock.median_s / runners[name].clock.median_s, 3) for name in OURS},
        # Beside the peer's best, which is fp32 where bf16 is slower.
        "ratio_bf16": round(
            min(one.clock.median_s for one in peers) / runners["mcore_rl, bf16 products"].clock.median_s, 3
        ),
        **circumstances(contention([runner.clock for runner in runners.values()]), peaks),
        "loss_difference": round(max(abs(a - b) for a, b in zip(peer.losses, ours.losses, strict=True)), 5),
        "models": models,
        "transformers_implementations_tokens_per_cpu_s": {n: round(s, 1) for n, s in screened.items()},
    }


def keep_memory() -> None:
    """Let glibc keep what is freed: neither trim the heap nor map large blocks anew."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        "workload      ratio (quartiles)    torch  bf16  contention  tokens/s ours  transformers  GFLOP/s  of peak  "
        "max |loss difference|"
    ]
    for name, figures in rows.items():
        ours, peer = figures["models"]["mcore_rl"], figures["models"]["transformers"]
        low, high = figures["ratio_quartiles"]
        lines.append(
            f"{name:12s} {figures['ratio']:6.2f} ({low:.2f}-{high:.2f})"
            f"      {figures['ratios']['mcore_rl, torch layers']:6.2f}  {figures['ratio_bf16']:4.2f}  "
            f"{figures['contention']:9.2f}{'!' if figures['is_contended'] else ' '}  "
            f"{ours['tokens_per_cpu_s']:13.0f}  {peer['tokens_per_cpu_s']:12.0f}  {ours['gflops']:7.1f}  "
            f"{ours['share_of_peak']:7.2f}  {figures['loss_difference']:.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, help="only this one, as JSON on standard output")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each model in a round")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="rows of the table")
    parser.add_argument("--allocator", choices=("kept", "default"), default="kept")
    arguments = parser.parse_args()
    if arguments.workload:
        torch.set_num_threads(1)
        if arguments.allocator == "kept":
            keep_memory()
        figures = compare(WORKLOADS[arguments.workload], arguments.rounds, arguments.steps)
        print(json.dumps(figures))
        return
    rows = {}
    for name in arguments.only:
        command = [sys.executable, "-m", "bench.pretrain", "--workload", name]
        command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        command += ["--allocator", arguments.allocator]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{table({name: rows[name]})}\n{circumstances_line(rows[name])}", flush=True)
        if AUTOCAST not in rows[name]["models"]:
            times = rows[name]["bf16_slowness"]
            print(f"without {AUTOCAST}: torch's product of bf16 takes {times:.1f} times as long as in fp32 here")
    print(f"\n{table(rows)}\n")
    write_results(RESULTS, {"allocator": arguments.allocator, "rows": rows})


if __name__ == "__main__":
    main()
