"""The table of every patch of torch and Megatron-Core: symbol, cause, versions, reason and end.

Importing this module applies the patches that this machine needs, once, and must come before any `import megatron`. A
version that is not in the table is refused.
"""

import importlib
import logging
import os
import queue
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.patches import replacements, router_losses
from mcore_rl.megatron.patches import standins as cpu
from mcore_rl.megatron.patches.found import Found, find_packages
from mcore_rl.megatron.patches.replacements import (
    find_overlap_on_grid,
    state_by_parameter,
    validate_plan_on_grid,
    weights_count_as_on_device,
)
from mcore_rl.storage.checkpoint import megatron_version

SUPPORTED = ("0.16", "0.19")
Cause = Literal["no CUDA", "no TransformerEngine", "no TransformerEngine or apex", "version"]
"""Why a patch is applied on this machine: torch sees no GPU, TransformerEngine is not usable (`found.Found`), neither
it nor apex is, or always, because the installed version of Megatron or torch is the cause.
"""
STANDS_IN = "Megatron asks torch.cuda whatever the device"
DEVICE_AGNOSTIC = "Megatron asks its config for the device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """`replace(original)` takes the place of `module:attribute`."""

    symbol: str
    replace: Callable[[Any], Any]
    cause: Cause = "no CUDA"
    reason: str = STANDS_IN
    until: str = DEVICE_AGNOSTIC
    versions: tuple[str, ...] = SUPPORTED
    is_defined: bool = True
    """Whether the symbol exists before the patch; False if its absence is the cause."""

    @property
    def is_of_torch(self) -> bool:
        """Whether it must be in place before Megatron is imported, which copies some of torch's functions."""
        return self.symbol.startswith("torch")

    def apply(self) -> None:
        """Put the replacement in place; AttributeError if the symbol does not exist any more."""
        module_name, _, path = self.symbol.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, self.replace(getattr(owner, name) if self.is_defined else None))


FACTORIES = (
    "tensor empty zeros ones full arange rand randn randint as_tensor "
    "empty_like zeros_like ones_like full_like rand_like"
).split()

PATCHES_WITHOUT_CUDA: tuple[Patch, ...] = (
    Patch(symbol="torch.cuda:current_device", replace=cpu.constant(cpu.CPU)),
    Patch(symbol="torch.cuda:device_count", replace=cpu.constant(1)),
    Patch(symbol="torch.cuda:set_device", replace=cpu.nothing),
    Patch(symbol="torch.cuda:synchronize", replace=cpu.nothing),
    Patch(symbol="torch.cuda:empty_cache", replace=cpu.nothing),
    Patch(symbol="torch.cuda:memory_allocated", replace=cpu.constant(0)),
    Patch(symbol="torch.cuda:stream", replace=cpu.null_stream_context),
    Patch(symbol="torch.cuda:Stream", replace=lambda _: cpu.Stream),
    Patch(symbol="torch.cuda:Event", replace=lambda _: cpu.Stream),
    Patch(symbol="torch.cuda:current_stream", replace=cpu.current_stream),
    Patch(symbol="torch.cuda:default_stream", replace=cpu.current_stream),
    Patch(symbol="torch.cuda.nvtx:range_push", replace=cpu.nothing),
    Patch(symbol="torch.cuda.nvtx:range_pop", replace=cpu.nothing),
    Patch(
        symbol="torch.cuda:manual_seed",
        replace=lambda _: torch.manual_seed,
        reason="without CUDA it is queued and never runs: expert-parallel ranks then start with equal experts",
    ),
    Patch(symbol="torch.cuda:get_rng_state", replace=lambda _: lambda *args, **kwargs: torch.get_rng_state()),
    Patch(symbol="torch.cuda.random:get_rng_state", replace=lambda _: lambda *args, **kwargs: torch.get_rng_state()),
    Patch(
        symbol="torch.cuda:set_rng_state", replace=lambda _: lambda state, *args, **kwargs: torch.set_rng_state(state)
    ),
    Patch(symbol="torch:Tensor.cuda", replace=cpu.same_tensor),
    Patch(symbol="torch.nn:Module.cuda", replace=cpu.same_tensor),
    Patch(symbol="torch:Tensor.record_stream", replace=cpu.nothing),
    Patch(symbol="torch:Tensor.to", replace=cpu.moved_to_cpu),
    Patch(symbol="torch:Tensor.type", replace=cpu.cuda_type_names),
    Patch(symbol="torch.distributed:all_to_all_single", replace=cpu.listed_splits),
    Patch(symbol="torch.distributed:all_gather", replace=cpu.uneven_all_gather),
    Patch(symbol="torch.distributed:barrier", replace=cpu.plain_barrier),
    Patch(
        symbol="torch.distributed.distributed_c10d:ProcessGroupGloo",
        replace=cpu.on_one_device,
        reason="each of a mesh's twenty groups has a thread that wakes a hundred times a second",
        until="the groups of a process share a device",
    ),
    *(Patch(symbol=f"torch:{name}", replace=cpu.on_cpu) for name in FACTORIES),
    Patch(
        symbol="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        replace=lambda _: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        replace=lambda _: lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
        reason="without CUDA it is queued and never runs: the tracker of random states never switches",
    ),
    Patch(
        symbol="megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        replace=weights_count_as_on_device,
        reason="only weights that call themselves CUDA's are offloaded, and a step fails with the others",
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random:_get_share_storage",
        replace=replacements.copied_storage,
        versions=("0.19",),
        reason="recomputation compiles a C++ extension at run time, on every rank",
        until="torch can share a storage without one",
    ),
    *(
        Patch(
            symbol=f"megatron.core.distributed.param_and_grad_buffer:{collective}",
            replace=replacements.unless_alone,
            reason="gloo copies the parameters and gradients twice although there is no other rank",
            until="Megatron calls no collective of one rank",
        )
        for collective in ("dist_all_gather_func", "dist_reduce_scatter_func")
    ),
)

PATCHES_WITHOUT_TRANSFORMER_ENGINE: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        replace=replacements.without_fp8,
        cause="no TransformerEngine",
        reason="it reads the default fp8=False as `fp8 is not None` and then needs TransformerEngine",
        until="it tests the value of fp8",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        replace=lambda _: None,
        is_defined=False,
        cause="no TransformerEngine",
        reason="the name is undefined without TransformerEngine and read with moe_router_dtype",
        until="it is defined as None",
    ),
    Patch(
        symbol="megatron.core.optimizer.optimizer_config:is_te_min_version",
        replace=lambda _: lambda *_args, **_kwargs: False,
        cause="no TransformerEngine",
        reason="0.16 compares the version of a package that is not there, None, when state of the optimizer is "
        "offloaded",
        until="no TransformerEngine is older than any",
    ),
    Patch(
        symbol="megatron.core.optimizer:is_te_min_version",
        replace=lambda _: lambda *_args, **_kwargs: False,
        cause="no TransformerEngine",
        reason="the same in a precision-aware optimizer, whose Adam is asked for remainders of weights by that version",
        until="no TransformerEngine is older than any",
    ),
    Patch(
        symbol="megatron.core.transformer.multi_latent_attention:HAVE_TE",
        replace=lambda _: False,
        versions=("0.16",),
        cause="no TransformerEngine",
        reason="importing Megatron's own stand-ins counts as having TransformerEngine; isinstance() then fails",
        until="0.19, which asks TransformerEngine itself",
    ),
)

ROUTER_LOSS_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.transformer.moe.router:TopKRouter.routing",
        replace=router_losses.losses_as_sums,
        cause="version",
        reason="with a per-token loss the balance and z losses are multiplied by the tokens of a rank and divided by "
        "those in the loss mask: they weigh more the fewer tokens are trained on. In 0.16 the loss of sequences weighs "
        "1 / rows of a micro-batch, and all of them tp * cp times less than on one rank; in both the global one weighs "
        "1 / dp, padding weighs by rank, and packed sequences count as one. Capacity is a number of tokens of each "
        "rank, so that tp and cp drop other tokens",
        until="losses are sums over tokens, divided by all tokens, and the capacity is that of a micro-batch",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",
        replace=router_losses.scale_as_scalar,
        cause="version",
        reason="the schedule's scale has one element, and cannot be copied into the scalar that a backward pass "
        "outside of a schedule leaves behind",
        until="both have one shape",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        replace=router_losses.padding_counts_no_tokens,
        cause="version",
        reason="a mask of padding [tokens] does not broadcast over the experts: an error, or with as many tokens as "
        "experts the wrong ones",
        until="it makes a column of the mask",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
        replace=router_losses.loads_in_float32,
        cause="version",
        reason="a bf16 model counts the tokens of its experts in bf16, which has no odd numbers above 256: the expert "
        "bias moves by rounded loads, and those of an expert with few tokens in every microbatch stop growing",
        until="it keeps the counts in float32 beside the bias",
    ),
    Patch(
        symbol="megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
        replace=router_losses.padding_cut_on_every_stage,
        cause="version",
        reason="only the first pipeline stage cuts the mask of padding for sequence parallelism; on later ones it is "
        "longer than the tokens",
        until="the mask is cut on every stage",
    ),
)


MODEL_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.parallel_state:create_group",
        replace=replacements.without_hosts,
        cause="version",
        reason="each group inherits the world's backends, so that every host connects to the hosts of all its groups",
        until="Megatron has an argument for the backend of a group",
    ),
    Patch(
        symbol="megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._mla_fused_linear_or_default",
        replace=replacements.direct_queries_unnormed,
        versions=("0.19",),
        cause="version",
        reason="without a latent for the queries it puts a norm before their projection when the keys' latent has one; "
        "0.16 and the published models (Moonlight) have none there",
        until="the two norms have a switch each",
    ),
    Patch(
        symbol="megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        replace=replacements.own_gates,
        versions=("0.16",),
        cause="version",
        reason="with fewer key/value heads than tensor-parallel ranks a rank gets the gates of its group's queries",
        until="0.19, which cuts them",
    ),
    Patch(
        symbol="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._checkpointed_forward",
        replace=replacements.only_tensors_saved,
        versions=("0.16",),
        cause="version",
        reason="full recomputation saves all arguments of the layer for the backward pass, which takes tensors only: a "
        "TypeError with packed sequences, whose lengths are an object",
        until="0.19, whose checkpoint captures what is no tensor",
    ),
    Patch(
        symbol="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
        replace=replacements.part_of_head_turned,
        cause="version",
        reason="it makes wavelengths for whole heads whatever part of a head is turned: Qwen3.5, GLM-4.5 and "
        "MiniMax-M2 turn a part, and reach their longest contexts by YaRN",
        until="it multiplies the width by rotary_percent before it makes them",
    ),
)

WAITING_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.transformer.moe.token_dispatcher:permute",
        replace=replacements.permuted_without_waiting,
        versions=("0.16",),
        cause="version",
        reason="it selects the rows of experts by a mask, whose true values the host counts: a GPU is drained twice in "
        "every layer of experts, and again for the tokens of each expert",
        until="0.19, which sorts",
    ),
    Patch(
        symbol="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
        replace=replacements.rotated_without_waiting,
        cause="version",
        reason="it cuts angles, in 0.19 also heads, into a slice for each sequence of a row, in every layer, by "
        "lengths that the host reads from a GPU",
        until="it takes the positions of the tokens",
    ),
)

RUNS_PROGRAMS = "it unpickles whatever the file asks for: a checkpoint from elsewhere could run any program here"
FOREIGN_FILE_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
        replace=lambda _: replacements.load_entry,
        cause="version",
        reason=f"torch.load(weights_only=False): {RUNS_PROGRAMS}",
        until="objects that are no tensors are loaded with weights_only=True",
    ),
    Patch(
        symbol="torch.distributed.checkpoint.filesystem:pickle",
        replace=replacements.restricted_pickle,
        cause="version",
        reason=f".metadata is read with pickle.load: {RUNS_PROGRAMS}",
        until=".metadata is read without pickle, or with an allow-list",
    ),
    Patch(
        symbol="megatron.core.dist_checkpointing.strategies.common:TorchCommonLoadStrategy.load_common",
        replace=replacements.load_common_method,
        versions=("0.16",),
        cause="version",
        reason="common.pt is read by another reader than the one that checked it, and with "
        f"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD {RUNS_PROGRAMS}",
        until="0.19, which has a function in its place",
    ),
    Patch(
        symbol="megatron.core.dist_checkpointing.serialization:load_common",
        replace=replacements.load_common_function,
        versions=("0.19",),
        cause="version",
        reason="common.pt is read by another reader than the one that checked it, and with "
        f"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD {RUNS_PROGRAMS}",
        until="common.pt is no longer read",
    ),
)

CHECKPOINT_PATCHES: tuple[Patch, ...] = (
    *FOREIGN_FILE_PATCHES,
    Patch(
        symbol="megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",
        replace=lambda _: queue.SimpleQueue(),
        cause="version",
        reason="planning a save starts a manager process for this queue, by spawn: seconds at the first save, a hang "
        "in a script without a main guard, an orphan after a kill. Our writers report through a ForkedCall instead",
        until="the queue is made by whoever uses it",
    ),
    Patch(
        symbol="torch.distributed._shard.sharding_spec._internals:_find_nd_overlapping_shards",
        replace=find_overlap_on_grid,
        cause="version",
        reason="its time grows with the square of layers x experts: minutes at every save and load of 48 x 128",
        until="it sweeps along the axis that has most shards",
    ),
    Patch(
        symbol="torch.distributed.checkpoint.default_planner:_validate_global_plan",
        replace=validate_plan_on_grid,
        cause="version",
        reason="the same on rank 0 at every save",
        until="it sweeps along the axis that has most shards",
    ),
    Patch(
        symbol="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        replace=lambda _: state_by_parameter,
        cause="version",
        reason="with padding between buckets (overlapped reduction, tied embeddings) it saves values of neighbours, "
        "silently; and it copies the state four times, even where no other rank has a part of it",
        until="offsets are counted as the gathered buffer is laid out",
    ),
)

NO_FUSED_ADAM = "Megatron cannot load DistributedOptimizer state into torch's Adam (a step per parameter)"
PATCHES_WITHOUT_FUSED_OPTIMIZER: tuple[Patch, ...] = (
    *(Patch(symbol=f"megatron.core.optimizer{name}", replace=replace, cause="no TransformerEngine or apex",
            reason=NO_FUSED_ADAM, until="DistributedOptimizer takes a torch Adam without state")
      for name, replace in (
          (":Adam", lambda _: cpu.FusedAdam),
          (":USING_PYTORCH_OPTIMIZER", lambda _: False),
          (".distrib_optimizer:Adam", lambda _: cpu.FusedAdam),
          (".distrib_optimizer:HAVE_APEX_OR_TE", lambda _: True),
          (".distrib_optimizer:USING_APEX_OPTIMIZER", lambda _: True),
      )),
    Patch(
        symbol="megatron.core.optimizer.clip_grads:l2_norm_impl",
        replace=lambda _: cpu.norm_of_tensors,
        cause="no TransformerEngine or apex",
        reason="it reads the norm of each gradient on the host, so that a GPU is drained once a tensor",
        until="it stacks the norms on the device",
    ),
    Patch(
        symbol="megatron.core.optimizer.clip_grads:multi_tensor_scale_impl",
        replace=replacements.scaled_in_place,
        cause="no TransformerEngine or apex",
        reason="a gradient is clipped by way of a copy, tensor by tensor",
        until="it scales in place",
    ),
)  # fmt: skip

PATCHES: tuple[Patch, ...] = (
    *PATCHES_WITHOUT_CUDA,
    *PATCHES_WITHOUT_TRANSFORMER_ENGINE,
    *PATCHES_WITHOUT_FUSED_OPTIMIZER,
    *ROUTER_LOSS_PATCHES,
    *MODEL_PATCHES,
    *WAITING_PATCHES,
    *CHECKPOINT_PATCHES,
)


def patches_for(version: str, *, has_cuda: bool, has_te: bool, has_apex: bool) -> list[Patch]:
    """Return the patches that a machine needs, in order, for Megatron-Core's "major.minor". Raises ConfigError if
    nothing is known of this version.
    """
    if version not in SUPPORTED:
        raise ConfigError(
            f"megatron-core {version} is installed; this code knows {' and '.join(SUPPORTED)}, whose inner "
            "parts differ. Install one of these."
        )
    causes: dict[Cause, bool] = {
        "no CUDA": not has_cuda,
        "no TransformerEngine": not has_te,
        "no TransformerEngine or apex": not (has_te or has_apex),
        "version": True,
    }
    return [patch for patch in PATCHES if causes[patch.cause] and version in patch.versions]


HARMLESS_WARNINGS = (
    # Message (the beginning, as a regular expression): what Megatron does with torch, or cannot have on a CPU.
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"full scope is deprecated",
    r"When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX",
    r"Apex is not installed",
    r"Transformer Engine and Apex are not installed",
)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """Replacement for `torch.compile`, as a function and as a decorator with arguments."""
    return model if model is not None else lambda inner: inner


def _install() -> tuple[Found, tuple[Patch, ...]]:
    if torch.version.cuda:
        # Megatron counts on communication being queued before the computation that hides it. CUDA reads this when it
        # starts, which the first package that asks a GPU for something makes it do.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = find_packages()
    patches = patches_for(megatron_version(), has_cuda=found.has_cuda, has_te=found.has_te, has_apex=found.has_apex)
    # `with torch.device(...)` knows the factories by identity, from the first time it is asked: it must know torch's.
    importlib.import_module("torch.utils._device")._device_constructors()
    for patch in patches:
        if patch.is_of_torch:
            patch.apply()
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    compile_ = torch.compile
    if not found.has_cuda:
        # Megatron's jit_fuser is torch.compile as it is during the import; on a CPU compiling costs more than it saves.
        torch.compile = _uncompiled
    importlib.import_module("megatron.core")
    importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    torch.compile = compile_
    for patch in patches:
        if not patch.is_of_torch:
            patch.apply()
    # On a CPU the CPU's generator is also the "device"'s: the warning would come at every fork.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # 0.16 asks for the class of an MoE layer by name, and warns of ours, which it then builds like its own.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    # 0.19 recommends its hybrid model at every GPTModel, and a layout that it computes by itself at every optimizer.
    for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    # 0.19 calls its own way to write, and the common.pt that 0.16 can read too, deprecated at every save and load.
    for name in ("torch", "common"):
        logging.getLogger(f"megatron.core.dist_checkpointing.strategies.{name}").setLevel(logging.ERROR)
    return found, tuple(patches)


FOUND, INSTALLED = _install()
"""The packages found when this module was imported, and the patches that are in place for them, in order."""
