"""Predicted against published training steps: `python -m bench.plan` prints a row for each run, and the errors.

The first prediction of a published run is with the rates of planning/device.py, which were fitted to all of them; the
second with rates that are fitted anew to the runs of the other families, as for a model of which no run is known.

A published figure is in tokens/s for each GPU (TOKENS), or in model TFLOP/s (TFLOPS), which are made tokens by this
package's count. Most are of force-balanced experts, and some tables do not say what is recomputed: what is assumed
stands in the row.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from typing import Any

from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.planning.device import DEVICES, Rates
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.planning.layer_times import Workload
from mcore_rl.planning.rollout import Engine, Lengths, forward_seconds, generation
from mcore_rl.planning.step import step, tokens_per_s
from mcore_rl.storage.files import shipped

RECIPES = shipped("recipes")
LENGTH = 4096
MOE_ACT = {"recompute": "selective", "recompute_modules": ("moe_act", "layernorm")}
LATENT = {"recompute": "selective", "recompute_modules": ("mla_up_proj", "mlp")}
LATENT_NORMS = {"recompute": "selective", "recompute_modules": ("mla_up_proj", "layernorm")}
NEMO, ZOO, BRIDGE = "Megatron-LM moe/README", "MoE-ModelZoo", "Megatron-Bridge 26.04.01"


def model(name: str, **update: Any) -> ModelConfig:
    """Return the model of a recipe, changed."""
    return load_config(RunConfig, RECIPES / name / "model.toml").model.model_copy(update=update)


DEEPSEEK, QWEN235, QWEN30 = model("deepseek_v3"), model("qwen3_235b_a22b"), model("qwen3_30b_a3b")
MIXTRAL = model("mixtral_8x7b")
MIXTRAL22 = MIXTRAL.model_copy(
    update={
        "num_layers": 56,
        "hidden_size": 6144,
        "num_heads": 48,
        "ffn_hidden_size": 16384,
        "moe": MIXTRAL.moe.model_copy(update={"ffn_hidden_size": 16384}),
    }
)
LLAMA70 = model("llama3_8b", num_layers=80, hidden_size=8192, num_heads=64, ffn_hidden_size=28672)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run and its speed."""

    name: str
    source: str
    model: ModelConfig
    device: str
    world: int
    batch: int
    mesh: dict[str, int]
    tokens: float | None = None
    """Tokens per second on each GPU."""
    tflops: float | None = None
    """Model TFLOP/s on each GPU, where tokens are not published."""
    micro: int = 1
    length: int = LENGTH
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def published(self) -> float:
        """Tokens per second on each GPU."""
        if self.tokens is not None:
            return self.tokens
        assert self.tflops is not None
        return self.tflops * 1e12 / train_flops_per_token(self.model, self.length)

    def workload(self) -> Workload:
        """Return the run as a workload; where chunks cannot be alike, embedding and loss count as layers."""
        mesh = MeshConfig(**self.mesh)
        if self.model.num_layers % (mesh.pp * mesh.vpp):
            mesh = mesh.model_copy(update={"pp_layout": "balanced"})
        return Workload(
            model=self.model,
            mesh=mesh,
            device=DEVICES[self.device],
            world_size=self.world,
            seq_length=self.length,
            micro_batch=self.micro,
            global_batch=self.batch,
            **({"deepep": True} | self.options),
        )

    @property
    def ratio(self) -> float:
        """Predicted / published tokens per second."""
        work = self.workload()
        return tokens_per_s(work, step(work).seconds) / self.published


def _q235(name: str, source: str, mesh: dict[str, int], step_s: float, **options: Any) -> Published:
    return Published(
        name=f"Qwen3-235B H100 bf16 {name}",
        source=source,
        model=QWEN235,
        device="H100",
        world=256,
        batch=2048,
        mesh=mesh,
        tokens=2048 * LENGTH / 256 / step_s,
        options=options,
    )


def _deepseek(name: str, source: str, device: str, world: int, batch: int, mesh: dict[str, int], tokens: float,
              **options: Any) -> Published:  # fmt: skip
    return Published(
        name=f"DeepSeek-V3 {name}",
        source=source,
        model=DEEPSEEK,
        device=device,
        world=world,
        batch=batch,
        mesh=mesh,
        tokens=tokens,
        options={"fp8": True} | options,
    )


TP2 = {"tp": 2, "pp": 8, "vpp": 4, "ep": 32}
PLAIN = {"deepep": False}
RUNS = (
    Published(name="Mixtral 8x7B H100 bf16", source=NEMO, model=MIXTRAL, device="H100", world=64, batch=256,
              mesh={"pp": 4, "vpp": 8, "ep": 8}, tflops=468, options=PLAIN),
    Published(name="Mixtral 8x22B H100 bf16", source=ZOO, model=MIXTRAL22, device="H100", world=128, batch=256,
              mesh={"tp": 2, "pp": 8, "vpp": 7, "ep": 8}, tflops=465, options=PLAIN),
    Published(name="Mixtral 8x22B H100 fp8", source=ZOO, model=MIXTRAL22, device="H100", world=128, batch=256,
              mesh={"tp": 2, "pp": 8, "vpp": 7, "ep": 8}, tflops=560, options=PLAIN | {"fp8": True}),
    _q235("tp2 ep32 pp8", ZOO, TP2, 19.7, **MOE_ACT),
    _q235("tp2 ep32 pp8, EP overlap", ZOO, TP2, 17.6, overlap_ep=True, **MOE_ACT),
    _q235("tp2 ep8 pp32", ZOO, {"tp": 2, "pp": 32, "vpp": 3, "ep": 8}, 24.2, **PLAIN, **MOE_ACT),
    _q235("tp4 ep8 pp8", ZOO, {"tp": 4, "pp": 8, "vpp": 4, "ep": 8}, 29.0),
    Published(name="Qwen3-235B H100 fp8 tp2 ep32 pp8, EP overlap", source=BRIDGE, model=QWEN235, device="H100",
              world=256, batch=8192, mesh=TP2, tokens=1712, options={"fp8": True, "overlap_ep": True} | MOE_ACT),
    Published(name="Qwen3-30B H100 fp8 ep16", source=BRIDGE, model=QWEN30, device="H100", world=16, batch=1024,
              mesh={"ep": 16}, tokens=8960, options={"fp8": True} | MOE_ACT),
    _deepseek("H100 fp8 tp2 ep64 pp8, EP overlap", "Megatron-Bridge 25.09", "H100", 1024, 8192,
              {"tp": 2, "pp": 8, "vpp": 4, "ep": 64}, 1297, overlap_ep=True, **LATENT),
    _deepseek("H800 fp8 ep64 pp16", "arXiv 2412.19437 table 1", "H800", 2048, 15360,
              {"pp": 16, "vpp": 2, "ep": 64}, 1e12 / 180e3 / 3600, overlap_ep=True, **LATENT_NORMS),
    _deepseek("B200 mxfp8 pp8 ep32", BRIDGE, "B200", 256, 4096, {"pp": 8, "vpp": 2, "ep": 32}, 3328, overlap_ep=True,
              **LATENT),
    _deepseek("GB200 mxfp8 pp4 ep64", BRIDGE, "GB200", 256, 4096, {"pp": 4, "vpp": 4, "ep": 64}, 4256, **LATENT),
    Published(name="Qwen3-235B GB200 mxfp8 pp8 ep32", source=BRIDGE, model=QWEN235, device="GB200", world=256,
              batch=8192, mesh={"pp": 8, "vpp": 3, "ep": 32}, tokens=5680, options={"fp8": True}),
    Published(name="Qwen3-235B GB200 bf16 pp8 ep8", source=ZOO, model=QWEN235, device="GB200", world=256,
              batch=8192, mesh={"pp": 8, "ep": 8}, tflops=750),
    Published(name="Qwen3-30B B200 mxfp8 ep8 micro 4", source=BRIDGE, model=QWEN30, device="B200", world=8, batch=512,
              mesh={"ep": 8}, micro=4, tokens=27136, options={"fp8": True} | MOE_ACT),
    Published(name="Qwen3-30B GB200 mxfp8 ep8 micro 4", source=BRIDGE, model=QWEN30, device="GB200", world=8, batch=512,
              mesh={"ep": 8}, micro=4, tokens=26112, options={"fp8": True}),
    Published(name="Llama-3 70B H100 fp8 tp4 pp8", source=BRIDGE, model=LLAMA70, device="H100", world=64, batch=256,
              mesh={"tp": 4, "pp": 8, "vpp": 5}, length=8192, tokens=1664, options={"fp8": True}),
)  # fmt: skip
"""Runs that the rates were fitted to."""
USERS = (
    Published(name="Qwen3-30B 32 H100 bf16 (ModelZoo issue 21)", source="issue", model=QWEN30, device="H100",
              world=32, batch=256, mesh={"ep": 8}, tflops=120, options=PLAIN),
    Published(name="Qwen3-30B 8 B200 bf16 (ModelZoo issue 7)", source="issue", model=QWEN30, device="B200", world=8,
              batch=64, mesh={"ep": 8}, tflops=150, options=PLAIN),
    Published(name="Qwen3-30B 8 B200 mxfp8 (Bridge issue 4439)", source="issue", model=QWEN30, device="B200", world=8,
              batch=512, mesh={"ep": 8}, micro=4, tflops=562, options={"fp8": True} | MOE_ACT),
    Published(name="Qwen3-30B 8 B200 bf16 (Bridge issue 4439)", source="issue", model=QWEN30, device="B200", world=8,
              batch=512, mesh={"ep": 8}, micro=4, tflops=552, options=MOE_ACT),
)  # fmt: skip
"""Runs that users reported in issues, which no rate was fitted to."""


@dataclass(frozen=True, kw_only=True)
class PublishedRl:
    """A published step of GRPO on DGX H100 in bf16 (NeMo-RL v0.4, performance summary), with vLLM on the same GPUs."""

    name: str
    model: ModelConfig
    world: int
    completions: int
    updates: int
    tokens: int
    """Mean tokens of prompt and completion together."""
    longest: int
    engine_tp: int
    mesh: dict[str, Any]
    seconds: float
    """Published seconds of a step."""

    def planned(self) -> dict[str, float]:
        """Return the bound on each part; prompts are taken to be of 120 tokens."""
        prompt, rates = 120, Rates()
        engine = Engine(
            replicas=self.world // self.engine_tp,
            tp=self.engine_tp,
            ep=self.engine_tp,
            slots=self.completions,
            layer_s=rates.decode_layer_s,
            is_served=True,
        )
        lengths = Lengths(
            num_completions=self.completions,
            prompt=prompt,
            mean=self.tokens - prompt,
            longest=self.longest - prompt,
            spread=0.6 if self.tokens < 0.6 * self.longest else 0.5,
        )
        rollout, _ = generation(self.model, DEVICES["H100"], engine, lengths, rates)
        mesh = MeshConfig(**self.mesh)
        dp = self.world // mesh.model_parallel
        length = -(-self.tokens // (mesh.zigzag * mesh.tp)) * mesh.zigzag * mesh.tp
        work = Workload(
            model=self.model,
            mesh=mesh,
            device=DEVICES["H100"],
            world_size=self.world,
            seq_length=length,
            micro_batch=1,
            global_batch=self.completions // self.updates // dp * dp,
            **MOE_ACT,
        )
        return {
            "rollout": rollout,
            "logprobs": 2 * self.updates * forward_seconds(work),
            "updates": self.updates * step(work).seconds,
        }

    @property
    def ratio(self) -> float:
        """Bound / published seconds."""
        return sum(self.planned().values()) / self.seconds


RL_RUNS = (
    PublishedRl(name="Llama-3.1 8B, 16 H100", model=model("llama3_8b"), world=16, completions=2048, updates=4,
                tokens=1060, longest=4096, engine_tp=1, mesh={"pp": 2}, seconds=97.7),
    PublishedRl(name="Qwen3-30B-A3B, 32 H100", model=QWEN30, world=32, completions=2048, updates=4, tokens=3154,
                longest=4096, engine_tp=4, mesh={"tp": 2, "ep": 8}, seconds=225.0),
    PublishedRl(name="Qwen3-235B-A22B, 128 H100", model=QWEN235, world=128, completions=512, updates=1, tokens=5671,
                longest=8192, engine_tp=16, seconds=506.0,
                mesh={"tp": 2, "cp": 2, "ep": 16, "pp": 8, "pp_layout": "balanced"}),
    PublishedRl(name="DeepSeek-V3, 256 H100", model=DEEPSEEK.model_copy(update={"mtp_layers": 0}), world=256,
                completions=512, updates=1, tokens=745, longest=1536, engine_tp=32, seconds=154.0,
                mesh={"ep": 16, "pp": 16, "pp_layout": "balanced"}),
)  # fmt: skip
"""Steps of reinforcement learning, of which planning/rollout.py gives a lower bound."""


def errors(runs: tuple[Published, ...]) -> list[float]:
    """Return the error of each run, by ratio: 1.3 is 30 % too fast or too slow."""
    return [max(run.ratio, 1 / run.ratio) for run in runs]


FITTED = {
    "products": (0.4, 0.9),
    "products_fp8": (0.3, 0.9),
    "hbm": (0.4, 0.95),
    "link": (0.4, 0.95),
    "nic": (0.4, 0.95),
    "host_layer_s": (5e-4, 8e-3),
    "host_expert_s": (3e-6, 2e-4),
    "host_fp8_s": (3e-6, 2e-4),
    "hidden": (0.2, 0.9),
}
"""Rates that a fit may change, with the range in which each is believed without any run."""
FACTORS = (1.4, 1.15, 1.05, 1.02)
"""Steps by which a fit changes a rate, the largest first."""
PULL = 0.01
"""Weight of a rate's squared distance, in logarithms, from the middle of its range: few runs do not tell all rates."""


def fit(works: Sequence[Workload], published: Sequence[float]) -> Rates:
    """Return the rates with which these steps are predicted best: the least squared logarithm of predicted over
    published tokens per second, by changing one rate at a time from the middles of their ranges.
    """
    middles = {name: sqrt(low * high) for name, (low, high) in FITTED.items()}

    def loss(values: dict[str, float]) -> float:
        rates = replace(Rates(), **values)
        wrong = sum(log(predicted(work, rates) / tokens) ** 2 for work, tokens in zip(works, published, strict=True))
        return wrong + PULL * sum(log(value / middles[name]) ** 2 for name, value in values.items())

    best, least = middles, loss(middles)
    for factor in FACTORS:
        improves = True
        while improves:
            improves = False
            for name, (low, high) in FITTED.items():
                for value in (best[name] * factor, best[name] / factor):
                    tried = best | {name: min(max(value, low), high)}
                    if (found := loss(tried)) < least * (1 - 1e-4):
                        best, least, improves = tried, found, True
    return replace(Rates(), **best)


def predicted(work: Workload, rates: Rates) -> float:
    """Return the tokens per second on each GPU that are predicted of a step with these rates."""
    changed = replace(work, rates=rates)
    return tokens_per_s(changed, step(changed).seconds)


def held_out() -> dict[str, float]:
    """Return predicted / published tokens per second of each of RUNS by its name, with rates that are fitted to the
    runs of the other families.
    """
    ratios = {}
    for family in {str(run.model.family) for run in RUNS}:
        others = [run for run in RUNS if run.model.family != family]
        rates = fit([run.workload() for run in others], [run.published for run in others])
        ratios |= {
            run.name: predicted(run.workload(), rates) / run.published for run in RUNS if run.model.family == family
        }
    return ratios


def summary(ratios: Sequence[float]) -> str:
    """Return the errors of predictions as text, for ratios to what was published: 1.3 and 1 / 1.3 are both 30 %."""
    found = [exp(abs(log(ratio))) for ratio in ratios]
    return f"median {statistics.median(found) - 1:.0%}, mean {statistics.fmean(found) - 1:.0%}, worst {max(found):.2f}x"


def main() -> None:
    """Print the table."""
    unknown = held_out()
    for title, runs in (("published", RUNS), ("reported by users, in no fit", USERS)):
        sys.stdout.write(f"{title}: tokens/s on each GPU, predicted / published\n")
        for trained in runs:
            ratio, other = trained.ratio, unknown.get(trained.name)
            shown = f"{ratio * trained.published:8,.0f} {ratio:5.2f} " + (f"{other:5.2f}" if other else " " * 5)
            sys.stdout.write(f"  {trained.name:52} {trained.published:8,.0f} {shown}  {trained.source}\n")
        sys.stdout.write(f"  error: {summary([run.ratio for run in runs])}\n")
        if runs is RUNS:
            sys.stdout.write(f"  error with the family held out: {summary(list(unknown.values()))}\n")
    sys.stdout.write("steps of GRPO (NeMo-RL v0.4): lower bound / published seconds\n")
    for run in RL_RUNS:
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in run.planned().items())
        sys.stdout.write(f"  {run.name:52} {run.seconds:8,.0f} {run.ratio:14.2f}  {parts}\n")


if __name__ == "__main__":
    main()
