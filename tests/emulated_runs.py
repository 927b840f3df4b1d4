"""What is run on emulated machines (tests/emulated_machine.py); each function returns what JSON can hold."""

from typing import Any

from mcore_rl.megatron import platform
from mcore_rl.megatron.patches.table import FOUND, INSTALLED

# isort: split
from megatron.core.transformer.moe import fused_a2a

from mcore_rl.cli import doctor
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import RopeConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh
from mcore_rl.model.transformer_config import transformer_config
from mcore_rl.programs.open_run import open_run
from mcore_rl.train.setup import set_up
from mcore_rl.train.step import NextTokenHead, train_step
from tests.emulated_gpu import active, counted_syncs
from tests.parallel import parity
from tests.tiny_models import TINY

FAMILY, STEPS, FEW_STEPS = "deepseek_v3", 3, 2
OF_THE_STEP = {
    *("_unscale_main_grads_and_check_for_nan", "get_grad_norm_fp32", "world_sums"),
    *("finalize_model_grads", "has_grad_norm_group"),  # Megatron 0.16, 0.19
}
"""Functions that wait for the device once a step or optimizer, when its work is done: they return what is logged."""
MEGATRON_FLAGS = (
    "moe_token_dispatcher_type moe_flex_dispatcher_backend fp8 fp8_recipe moe_permute_fusion moe_router_fusion "
    "cross_entropy_loss_fusion cross_entropy_fusion_impl gradient_accumulation_fusion apply_rope_fusion "
    "bias_activation_fusion bias_dropout_fusion"
).split()


def config(layers: str = "auto", capacity_factor: float | None = None, precision: str = "fp32") -> PretrainConfig:
    """Latent attention, a router in fp32 and recomputation: most of what the patches are for."""
    moe = TINY[FAMILY].moe.model_copy(update={"capacity_factor": capacity_factor})
    recomputed = ("layernorm", "moe_act", "mla_up_proj")
    settings = PlatformConfig.model_validate(
        {
            "layers": layers,
            "precision": precision,
            "recompute": "selective",
            "recompute_modules": recomputed,
            # In chunks on a GPU and whole on the CPU that it is compared with.
            "logits_chunk_tokens": 7 if active() else None,
        }
    )
    return parity.config_of(TINY[FAMILY].model_copy(update={"moe": moe}), MeshConfig(), settings)


def examine() -> dict[str, Any]:
    """The patches in place, the packages that are hidden, and the findings of `mcore-rl doctor`."""
    findings = doctor.examine()
    return {
        "patches": [patch.symbol for patch in INSTALLED],
        "unusable": dict(FOUND.unusable),
        "first_call": gpu.first_call if (gpu := active()) else None,
        "doctor": findings,
        "megatron": megatron_flags() if FOUND.has_cuda and FOUND.has_te else {},
    }


def megatron_flags() -> dict[str, Any]:
    """What Megatron's config has where all flags of speed are "auto": bf16 in 8 bits, pretraining."""
    settings = PlatformConfig(precision="bf16", fp8="hybrid")
    started, mesh = platform.start(settings), build_mesh(MeshConfig())
    moe = TINY["qwen3_moe"].moe.model_copy(update={"dispatcher": "hybridep"})
    fused_a2a.HAVE_HYBRIDEP = True  # as the import of deep_ep decides
    model = TINY["qwen3_moe"].model_copy(update={"moe": moe})
    config = transformer_config(model, mesh, started, settings)
    stretched = model.model_copy(update={"rope": RopeConfig(scaling="yarn", factor=4.0)})
    of_yarn = transformer_config(stretched, mesh, started, settings)
    destroy_mesh()
    platform.stop()
    flags = {name: getattr(config, name) for name in MEGATRON_FLAGS}
    return flags | {"apply_rope_fusion with YaRN": of_yarn.apply_rope_fusion}


def precision(run_dir: str) -> str:
    """The precision of a run with precision "auto"; its log is printed before."""
    run = platform.decided(PretrainConfig(run_dir=run_dir, model=TINY["llama"]))
    started = platform.start(run.platform)
    with open_run(run, started):
        pass
    platform.stop()
    return run.platform.precision


def train(layers: str = "auto") -> dict[str, Any]:
    """The patches in place, and losses and gradient norms of a few Adam steps; the same with a capacity of the experts,
    which Megatron's dispatcher sorts. On a GPU also where both wait in bf16, which has a kernel for all experts.
    """
    trained = {
        capacity: steps_of(config(layers, capacity), steps) for capacity, steps in ((None, STEPS), (1.0, FEW_STEPS))
    }
    waits = {
        name: steps_of(config(layers, capacity, precision="bf16"), FEW_STEPS)
        for name, capacity in (("local", None), ("dispatched", 1.0))
        if active()
    }
    return {**examine(), **trained[None], "dispatched": trained[1.0], "waits": waits}


def steps_of(run: PretrainConfig, steps: int) -> dict[str, Any]:
    started = platform.start(run.platform)
    state = set_up(run, started)
    reports = []
    for step in range(steps):
        batch = parity.batch(state, step)
        with counted_syncs() as syncs:
            reports.append(train_step(state, batch, NextTokenHead()))
    waits = dict(syncs)
    destroy_mesh()
    platform.stop()
    return {
        "platform": started.describe(),
        "losses": [report.loss for report in reports],
        "grad_norms": [report.grad_norm for report in reports],
        "syncs": waits,
        "microbatches": len(batch),
        "moe_layers": TINY[FAMILY].num_layers - TINY[FAMILY].moe.first_dense_layers,
    }
