"""Checks that the settings of a run are compatible; a violation names the reason and the remedy.

Megatron keeps most of these rules in scripts that are not part of its package, and would break some without an error.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from math import gcd, lcm

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.checks.model import divisors, fp8_violations, lora_violations, model_violations, unused
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.describe import describe
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig, absent_muon
from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, RunConfig, TrainConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.families import family_of, te_violations


def refuse_nothing_to_evaluate(config: RunConfig) -> None:
    """Raise a ConfigError if the config names no prompts, or no pairs, for `mcore-rl eval`."""
    if isinstance(config, RlRunConfig) and config.rl.prompts.task == "file" and not config.rl.eval.files:
        raise ConfigError("rl.eval.files is empty: there are no prompts to evaluate on. Name files.")
    if isinstance(config, PreferenceRunConfig) and not config.data.valid:
        raise ConfigError("data.valid is empty: there are no pairs to evaluate on. Name files.")


PACKAGES = ("wandb", "mlflow", "swanlab", "trackio")
"""Entries of log.sinks that need a module of the same name, which is an extra of this package."""


def absent_packages(config: RunConfig) -> Iterator[str]:
    """Yield an error message for each package that the sinks and optimizers of a run need and that is not installed."""
    optims = {"optim": config.optim, "rl.advantage.critic.optim": config.critic_optim}
    for field, optim in optims.items():
        if optim is not None and optim.kind == "muon" and (absent := absent_muon(field)):
            yield absent
    for sink in config.log.sinks:
        if sink in PACKAGES and importlib.util.find_spec(sink) is None:
            yield (
                f"log.sinks names {sink}, which is not installed. Install it: `pip install "
                f"'mcore-rl[{sink}]'`; or leave {sink} out."
            )


LONGEST_NAME, LONGEST_PATH = 255, 3500
OURS = ("torch", "cpu")
"""Values of `platform.layers` that are not TransformerEngine's."""
TE_FUSIONS = ("permute_fusion", "router_fusion", "weight_gradient_fusion")
"""Fields of `platform` with kernels that only TransformerEngine's layers have."""


def check(config: PretrainConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    refuse(
        [
            *run_violations(config, world_size, config.data.seq_length, "data.seq_length"),
            *batch_violations(config.train, config.mesh, world_size),
            *_data(config),
        ]
    )


def refuse(violations: Sequence[str]) -> None:
    """Raise a ConfigError that lists the violations, if there are any."""
    if violations:
        raise ConfigError("\n".join(f"- {violation}" for violation in violations))


def run_violations(config: RunConfig, world_size: int, seq_length: int, field: str) -> Iterator[str]:
    """Yield a sentence for each fault in the sections that all trainings share; `field` sets the sequences' length."""
    model, mesh = config.model, config.mesh
    yield from _run_dir(config.run_dir)
    yield from model_violations(model)
    yield from _program(config)
    yield from mesh_violations(model, mesh, seq_length, field)
    yield from fp8_violations(model, mesh, config.platform, config.train.micro_batch, seq_length, field)
    yield from _world(mesh, model, world_size)
    yield from optimizer_violations(config.optim, config.platform, config.train.steps)
    yield from muon_violations(config.optim, config, "optim")
    yield from _platform(config.platform, model, mesh)
    yield from _overlapped_tensor_parallelism(config)
    yield from _recompute(config.platform, model, mesh)
    yield from lora_violations(config.lora, config)


def _run_dir(run_dir: str) -> Iterator[str]:
    longest = max(len(os.fsencode(part)) for part in run_dir.split("/"))
    if not run_dir or "\0" in run_dir:
        yield f"run_dir={toml_value(run_dir)} is no name of a folder. Choose another."
    elif run_dir.startswith("~"):
        yield (
            f"run_dir={toml_value(run_dir)} begins with ~, in which only a shell sees the home folder: the run would "
            'write to a folder of the name "~" in this one. Give the whole path.'
        )
    elif longest > LONGEST_NAME or len(os.fsencode(run_dir)) > LONGEST_PATH:
        yield (
            f'run_dir="{run_dir[:40]}..." is too long: file systems take names of 255 bytes and paths of 4,096, and '
            "files in the folder need some of them. Choose another."
        )


def _program(config: RunConfig) -> Iterator[str]:
    head, platform = config.model.head, config.platform
    if head == "score" and not config.trains_scores:
        yield (
            'model.head="score": this program trains logits; a reward model is trained by `mcore-rl rm`. Set '
            'model.head="logits".'
        )
    elif head == "logits" and config.trains_scores:
        yield 'model.head="logits": a reward model returns one number for a sequence. Set model.head="score".'
    if config.unfuses_router and platform.router_fusion is True:
        yield (
            "platform.router_fusion=true in reinforcement learning: the fused router shows no choices to record, and "
            'takes none that a replay imposes. Set it to "auto".'
        )
    modules = platform.recompute_modules if platform.recompute == "selective" else ()
    if config.mesh.overlap_shared_experts and "shared_experts" in modules:
        yield (
            'mesh.overlap_shared_experts=true with "shared_experts" in platform.recompute_modules: Megatron cannot '
            "compute them again in parts. Take it out, or set the overlap to false."
        )
    keys = [doc.key for doc in describe(type(config))]
    for name in config.checkpoint.allow_changes:
        if name != "numerics" and not any(key == name or key.startswith(f"{name}.") for key in keys):
            yield (
                f"checkpoint.allow_changes names {toml_value(name)}, which is no field and no section. Name those "
                'whose changed values a resume should accept, as ["train.seed"].'
            )


def tokenizer_violations(tokenizer: TokenizerConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the section of the tokenizer."""
    if tokenizer.kind != "none" and not tokenizer.path:
        yield f'data.tokenizer.kind="{tokenizer.kind}" has no path. Set data.tokenizer.path.'
    yield from unused("data.tokenizer", tokenizer, (tokenizer.kind == "none", "path", 'data.tokenizer.kind="none"'))


def chat_violations(tokenizer: TokenizerConfig, chat_template: str, text: str) -> Iterator[str]:
    """Yield a sentence for each reason why this tokenizer and template cannot make tokens of `text` ("prompts")."""
    yield from tokenizer_violations(tokenizer)
    if tokenizer.kind == "none":
        yield f'data.tokenizer.kind="none", but {text} are text. Set it, and data.tokenizer.path.'
    if tokenizer.kind == "sentencepiece" and chat_template not in ("plain", "raw"):
        yield (
            f'data.chat_template="{chat_template}" with data.tokenizer.kind="sentencepiece": a jinja template '
            'marks turns with special tokens, which a .model file alone does not name. Set it to "plain" or "raw".'
        )


def _world(mesh: MeshConfig, model: ModelConfig, world_size: int) -> Iterator[str]:
    dense = f"mesh.tp={mesh.tp} x pp={mesh.pp} x cp={mesh.cp}"
    expert = mesh.etp * mesh.ep * mesh.pp if model.is_moe else 1
    unit = lcm(mesh.model_parallel, expert)
    fixed = None if mesh.dp == "auto" else mesh.model_parallel * mesh.dp
    if fixed is not None and fixed % expert:
        yield (
            f"{dense} x dp={mesh.dp} takes {fixed} ranks, but the experts' mesh.etp={mesh.etp} x "
            f"ep={mesh.ep} x pp={mesh.pp} needs a multiple of {expert}. Set mesh.dp to a multiple of "
            f'{unit // mesh.model_parallel}, or to "auto" for what the world size leaves.'
        )
    elif fixed is not None and world_size != fixed:
        yield (
            f"The world has {world_size} ranks, but {dense} x dp={mesh.dp} takes {fixed}. Start so "
            f'many, or set mesh.dp="auto" for what the world size leaves (any multiple of {unit} fits).'
        )
    elif world_size % unit:
        experts = f" and the experts' etp={mesh.etp} x ep={mesh.ep} x pp={mesh.pp}" if model.is_moe else ""
        yield (
            f"The world has {world_size} ranks, which {dense}{experts} do not fit. "
            f"Start {unit}, {2 * unit}, {3 * unit} or another multiple of {unit}."
        )


def batch_violations(train: TrainConfig, mesh: MeshConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence if a batch does not divide evenly over the data-parallel ranks."""
    yield from _ramp(train)
    dp, rest = divmod(world_size, mesh.model_parallel)
    if rest or mesh.dp not in ("auto", dp):
        return  # the world does not fit, which _world reports
    unit = train.micro_batch * dp
    reason = f"train.micro_batch={train.micro_batch} x {dp} data-parallel ranks"
    if mesh.vpp > 1:
        unit *= mesh.pp
        reason += f" x mesh.pp={mesh.pp} (with mesh.vpp > 1 microbatches go round in groups of pp)"
    sizes = {"train.global_batch": train.global_batch}
    if train.ramp_start and train.ramp_increment:
        sizes |= {"train.ramp_start": train.ramp_start, "train.ramp_increment": train.ramp_increment}
    for name, size in sizes.items():
        if size % unit:
            near = sorted({max(unit, size - size % unit), size - size % unit + unit})
            yield f"{name}={size} is not a multiple of {reason} = {unit}. Use {' or '.join(map(str, near))}."


def _ramp(train: TrainConfig) -> Iterator[str]:
    start, increment, samples = train.ramp_start, train.ramp_increment, train.ramp_samples
    if start is increment is samples is None:
        return
    settings = ", ".join(
        f"train.ramp_{name}={toml_value(value)}"
        for name, value in (("start", start), ("increment", increment), ("samples", samples))
    )
    if start is None or increment is None or samples is None:
        yield (f'{settings}: a growing batch needs all three, a constant one none. Set the missing, or all to "none".')
    elif start >= train.global_batch or (train.global_batch - start) % increment:
        yield (
            f"{settings}: no number of increments leads from the start to "
            f"train.global_batch={train.global_batch}. Choose ramp_start below it, and an increment that "
            "divides the difference."
        )


def optimizer_violations(
    optim: OptimConfig, platform: PlatformConfig, steps: int, field: str = "optim", steps_field: str = "train.steps"
) -> Iterator[str]:
    """Yield a sentence for each fault in section `field`: its schedule over the steps, its number formats."""
    if optim.min_lr > optim.lr:
        yield f"{field}.min_lr={optim.min_lr} is above {field}.lr={optim.lr}, from which it decays. Lower it."
    end = steps if optim.decay_steps == "auto" else optim.decay_steps
    name = steps_field if optim.decay_steps == "auto" else f"{field}.decay_steps"
    if optim.warmup_steps >= end:
        yield (
            f"{field}.warmup_steps={optim.warmup_steps} does not end before {name}={end}: nothing is left for "
            "the schedule. Warm up for fewer steps."
        )
    elif optim.schedule == "wsd":
        decay = max(1, steps // 10) if optim.wsd_decay_steps == "auto" else optim.wsd_decay_steps
        if optim.warmup_steps + decay > end:
            yield (
                f"{field}.warmup_steps={optim.warmup_steps} and a decay over {decay} steps "
                f"({field}.wsd_decay_steps={optim.wsd_decay_steps}) do not both fit before {name}={end}. "
                "Shorten one of them."
            )
    if optim.offload_fraction and platform.precision == "fp32":
        yield (
            f'{field}.offload_fraction={optim.offload_fraction:g} with platform.precision="{platform.precision}": '
            "Megatron's hybrid optimizer makes fp32 weights of 16-bit ones, and cannot load a checkpoint where the "
            'weights are fp32 already. Set platform.precision="bf16", or offload_fraction=0.'
        )
    lowered = [
        name for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype") if getattr(optim, name) != "fp32"
    ]
    if lowered and platform.precision == "fp32":
        yield (
            f'{field}.{lowered[0]}="bf16" with platform.precision="{platform.precision}": Megatron\'s precision-aware '
            "optimizer makes the fp32 copies of 16-bit weights itself, and would have fp32 weights twice. Set "
            f'platform.precision="bf16", or {" and ".join(f"{field}.{name}" for name in lowered)} to "fp32".'
        )
    if lowered and optim.offload_fraction:
        yield (
            f'{field}.{lowered[0]}="bf16" with {field}.offload_fraction={optim.offload_fraction:g}: the optimizer in '
            "main memory has fp32 moments, and takes fp32 gradients. Set "
            f'{" and ".join(f"{field}.{name}" for name in lowered)} to "fp32", or offload_fraction=0.'
        )


def muon_violations(optim: OptimConfig, config: RunConfig, field: str) -> Iterator[str]:
    """Yield a sentence for each setting of a run that does not fit the optimizer in section `field`, if it is Muon."""
    yield from unused(f"{field}.muon", optim.muon, (optim.kind == "adam", "", f'{field}.kind="adam"'))
    mesh, model = config.mesh, config.model
    reasons = {
        f"lora.rank={config.lora.rank}: no update of adapters by Muon has been compared with any other. Leave "
        "lora.rank out": config.lora.is_on and field == "optim",
        "mesh.overlap_param_gather=true: each rank updates all of its weights, and none are gathered. Set it to "
        '"auto"': mesh.overlap_param_gather is True,
        f"mesh.tp={mesh.tp} for model.num_kv_heads={model.num_kv_heads}: a rank's rows are not whole groups of "
        "queries, key and value, each of which is made orthogonal by itself. Lower mesh.tp": mesh.tp
        > model.num_kv_heads
        and not family_of(model).is_latent,
    }
    for name in ("offload_fraction", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"):
        value = getattr(optim, name)
        reasons[f"{field}.{name}={toml_value(value)}, which is Adam's alone. Leave it out"] = value not in (0, "fp32")
    for reason in (reason for reason, holds in reasons.items() if holds and optim.kind == "muon"):
        yield f'{field}.kind="muon" with {reason}.'


def weight_violations(
    name: str,
    weights: Sequence[float],
    sources_name: str,
    sources: Sequence[str],
    without: str = "to read everything once an epoch",
) -> Iterator[str]:
    """Yield a sentence for each fault in the weights `name` of `sources_name`; `without` is why to omit them."""
    if weights and len(weights) != len(sources):
        yield (
            f"{name} has {len(weights)} weights for {len(sources)} entries of {sources_name}. Give one each, or none "
            f"{without}."
        )
    if any(weight <= 0 for weight in weights):
        yield f"{name}={list(weights)}: a weight is above 0. Leave out of {sources_name} what is not wanted."


def _data(config: PretrainConfig) -> Iterator[str]:
    data, train, top_k = config.data, config.train, config.model.indexer.top_k
    if not data.train:
        yield "data.train is empty. Name the prefixes of .bin/.idx pairs, as `mcore-rl data preprocess` makes them."
    yield from weight_violations(
        "data.train_weights", data.train_weights, "data.train", data.train, "to weigh by tokens"
    )
    if min(data.split) < 0 or data.split[0] <= 0:
        yield (f"data.split={list(data.split)}: no share is negative, training needs one. Use numbers like 98, 1, 1.")
    elif train.eval_batches and not data.valid and not data.split[1]:
        yield (
            f"train.eval_batches={train.eval_batches}, but there is nothing to evaluate on: data.valid is "
            f"empty and data.split={list(data.split)} leaves it none. Name files, change the split, or set "
            'train.eval_batches="none".'
        )
    yield from tokenizer_violations(data.tokenizer)
    if top_k is not None and data.seq_length > top_k and config.checkpoint.load is None:
        yield (
            f"data.seq_length={data.seq_length} with model.indexer.top_k={top_k} and without checkpoint.load: indexers "
            "are not trained here (arXiv 2512.02556 trains them by a loss of their own), and random ones would choose "
            f"the keys of queries behind position {top_k}. Set data.seq_length to {top_k} or less, or checkpoint.load."
        )


def _overlapped_tensor_parallelism(config: RunConfig) -> Iterator[str]:
    mesh, model, platform = config.mesh, config.model, config.platform
    if not mesh.overlap_tp:
        return
    has_one_shape = isinstance(config, PretrainConfig | SFTConfig)
    reasons = {
        "TransformerEngine's user buffers have one shape for a whole run, as batches of pretraining and fine-tuning do "
        "and those of this program do not": not has_one_shape,
        f"mesh.tp={mesh.tp} sends nothing": mesh.tp == 1,
        f"mesh.sequence_parallel=false with mesh.tp={mesh.tp}: what overlaps are its gathers and reductions": mesh.tp
        > 1
        and not mesh.sequence_parallel,
        'platform.device="cpu" has no user buffers': platform.device == "cpu",
        'platform.layers="torch" has no user buffers': platform.layers == "torch",
        f'platform.precision="{platform.precision}": the buffers are bf16': platform.precision == "fp32",
        f'platform.fp8="{platform.fp8}": TransformerEngine takes them with some recipes only': platform.fp8 != "none",
        f"{model.family}'s latent attention has projections for which Megatron switches it off, and with them for all "
        "later layers": family_of(model).is_latent,
        f"model.mtp_layers={model.mtp_layers} have a projection for which Megatron switches it off": model.mtp_layers
        > 0,
        "mesh.overlap_shared_experts=true takes the same messages apart itself": mesh.overlap_shared_experts,
    }
    for reason, holds in reasons.items():
        if holds:
            yield f"mesh.overlap_tp=true, but {reason}. Set it to false."


def _platform(platform: PlatformConfig, model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    wants_te = {
        f'platform.fp8="{platform.fp8}"': platform.fp8 != "none",
        'platform.cross_entropy_fusion="te"': platform.cross_entropy_fusion == "te",
        **{f"platform.{name}=true": getattr(platform, name) is True for name in TE_FUSIONS},
    }
    wants_cuda = wants_te | {
        'platform.layers="te"': platform.layers == "te",
        f'model.moe.dispatcher="{model.moe.dispatcher}"': model.is_moe and model.moe.is_flex,
    }
    for setting in (setting for setting, is_set in wants_cuda.items() if is_set and platform.device == "cpu"):
        yield f'{setting} needs CUDA, but platform.device="cpu". Change one of them.'
    for setting in (setting for setting, is_set in wants_te.items() if is_set and platform.layers in OURS):
        yield f'{setting} needs TransformerEngine, but platform.layers="{platform.layers}". Change one of them.'
    if platform.cross_entropy_fusion == "native" and platform.precision == "fp32":
        yield (
            'platform.cross_entropy_fusion="native" with platform.precision="fp32": Megatron rounds the gradient of '
            'the logits to bf16. Set it to "auto", or platform.precision="bf16".'
        )
    yield from unused("platform", platform, (platform.fp8 == "none", "fp8_recipe", 'platform.fp8="none"'))
    if platform.batch_invariant and platform.layers == "te":
        yield (
            'platform.batch_invariant=true with platform.layers="te": TransformerEngine chooses its kernels by the '
            'number of rows. Set platform.layers="torch".'
        )
    if platform.layers == "te":
        yield from te_violations(model, mesh, platform)
    by_torch = {"gated delta nets": "delta" in model.mixers, "an indexer": model.indexer.top_k is not None}
    for part in (part for part, is_there in by_torch.items() if is_there and platform.batch_invariant):
        yield (
            f'platform.batch_invariant=true with model.family="{model.family}", which has {part}: torch computes them '
            "with all tokens at once. Set it to false."
        )
    if platform.layers == "cpu" or platform.bf16_products:
        yield from _cpu_layers(platform)
    if platform.batch_invariant and (family_of(model).has_attention_sinks or model.attention_dropout):
        yield (
            f'platform.batch_invariant=true with model.family="{model.family}" and model.attention_dropout='
            f"{model.attention_dropout}: its attention has neither sinks nor dropout. Set it to false."
        )


def _cpu_layers(platform: PlatformConfig) -> Iterator[str]:
    asked = 'platform.layers="cpu"' if platform.layers == "cpu" else "platform.bf16_products=true"
    reasons = {
        f'platform.layers="{platform.layers}": only the compiled layers of a CPU round the operands of their products. '
        "Set platform.bf16_products=false": platform.layers not in ("auto", "cpu"),
        'platform.device="cuda": these layers are compiled for CPUs. Change one of them': platform.device == "cuda",
        'platform.precision="bf16": the compiled layers compute tensors in fp32. Set platform.precision="fp32", or '
        'platform.layers="torch" and bf16_products=false': platform.precision == "bf16",
        "platform.batch_invariant=true: the compiled experts multiply all rows of an expert at once. Set "
        'platform.layers="torch"': platform.batch_invariant,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"{asked} with {reason}."


def _recompute(platform: PlatformConfig, model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    """Check what is computed again: full recomputation cuts each stage's chunks into whole groups, as Megatron 0.16
    reads past their end, and selective recomputation takes modules that the model has.
    """
    if platform.recompute == "full":
        shortest = gcd(*mesh.chunk_layers(model.num_layers, model.mtp_layers))
        layers, depth = platform.recompute_layers, model.mtp_layers
        if shortest and shortest % layers:
            yield (
                f"platform.recompute_layers={layers} does not divide the layers of each stage's chunks. Set it to one "
                f"of {divisors(shortest)}."
            )
        elif depth and layers != 1:
            yield (
                f"platform.recompute_layers={layers} with model.mtp_layers={depth}: Megatron recomputes the layers of "
                "multi-token prediction one at a time. Set it to 1."
            )
    if platform.recompute != "selective":
        return
    if not platform.recompute_modules:
        yield 'platform.recompute="selective" without platform.recompute_modules. Name some, or set "none".'
    present = {
        "moe": model.is_moe,
        "moe_act": model.is_moe,
        "shared_experts": model.is_moe and model.moe.shared_experts > 0,
        "mla_up_proj": family_of(model).is_latent,
        "mlp": not all(model.moe_layers),
    }
    for module in platform.recompute_modules:
        if not present.get(module, True):
            yield (
                f'platform.recompute_modules names "{module}", which this {model.family} model does not '
                "have. Take it out."
            )
        elif platform.fp8 != "none" and platform.fp8_recipe == "delayed" and module in ("moe_act", "layernorm"):
            yield (
                f'platform.recompute_modules names "{module}", which Megatron cannot recompute with '
                'platform.fp8_recipe="delayed". Take it out, or set the recipe to "auto".'
            )
