"""Megatron-LM's arguments for speed and memory, with the config fields that replace them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An argument of Megatron-LM, or several that belong together."""

    names: tuple[str, ...]
    """Names without leading dashes, as in Megatron's own configs."""
    field: str = ""
    """Field of a run's config; "" if the argument is not offered."""
    on_gpus: str = ""
    """Default on GPUs."""
    on_cpus: str = ""
    """Default on CPUs."""
    note: str
    """Its requirements and the evidence for it; for an argument that is not offered, the reason in whole sentences."""


NOT_RUN = "not yet run on a GPU"
TE_KERNEL = f"a kernel of TransformerEngine; {NOT_RUN}"
ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        names=("overlap_grad_reduce",),
        field="mesh.overlap_grad_reduce",
        on_gpus="on where weights have copies",
        on_cpus="off",
        note=f"equal to without it on CPUs; {NOT_RUN}",
    ),
    Argument(
        names=("overlap_param_gather",),
        field="mesh.overlap_param_gather",
        on_gpus="on with overlap_grad_reduce",
        on_cpus="off",
        note="checkpoints, pushes of weights and rollouts wait for the weights; equal to without it on CPUs; "
        f"{NOT_RUN}",
    ),
    Argument(
        names=("moe_shared_expert_overlap",),
        field="mesh.overlap_shared_experts",
        on_gpus="off",
        on_cpus="off",
        note=f"ep or etp > 1; equal to without it on CPUs; {NOT_RUN}",
    ),
    Argument(
        names=("tp_comm_overlap",),
        field="mesh.overlap_tp",
        on_gpus="off",
        on_cpus="off",
        note="pretraining and fine-tuning with layers te in bf16, tp > 1 and sequence_parallel; not with latent "
        "attention and MTP, for whose layers Megatron switches it off; its wiring is that of Megatron-LM's scripts, "
        f"{NOT_RUN}",
    ),
    Argument(
        names=("overlap_p2p_comm", "no_overlap_p2p_communication"),
        field="mesh.overlap_p2p",
        on_gpus="on with vpp > 1",
        on_cpus="on with vpp > 1",
        note="equal to one rank on CPUs",
    ),
    Argument(
        names=("moe_permute_fusion",),
        field="platform.permute_fusion",
        on_gpus="on with layers te",
        on_cpus="off",
        note=TE_KERNEL,
    ),
    Argument(
        names=("moe_router_fusion",),
        field="platform.router_fusion",
        on_gpus="on with layers te, never in RL",
        on_cpus="off",
        note=f"hides the router's choices from replay; {TE_KERNEL}",
    ),
    Argument(
        names=("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        field="platform.cross_entropy_fusion",
        on_gpus="native in bf16 with layers te",
        on_cpus="none",
        note="native equals the plain loss on CPUs and rounds its gradient to bf16; Megatron-LM refuses te by default",
    ),
    Argument(
        names=("gradient_accumulation_fusion", "no_gradient_accumulation_fusion"),
        field="platform.weight_gradient_fusion",
        on_gpus="on with layers te and apex",
        on_cpus="off",
        note=f"a kernel of apex; {NOT_RUN}",
    ),
    Argument(
        names=("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        field="model.moe.dispatcher",
        on_gpus="alltoall",
        on_cpus="alltoall",
        note=f"deepep and hybridep need CUDA and the package deep_ep (for hybridep its branch); {NOT_RUN}",
    ),
    Argument(
        names=("fp8_format", "fp8"),
        field="platform.fp8",
        on_gpus="none",
        on_cpus="none",
        note=f"layers te; widths and tokens of a rank in multiples of 16, of mxfp8 32; {NOT_RUN}",
    ),
    Argument(
        names=("fp8_recipe",),
        field="platform.fp8_recipe",
        on_gpus="mxfp8 on Blackwell, blockwise on Hopper, else tensorwise",
        on_cpus="",
        note=f"with fp8; {NOT_RUN}",
    ),
    Argument(
        names=("optimizer_cpu_offload", "optimizer_offload_fraction"),
        field="optim.offload_fraction",
        on_gpus="0",
        on_cpus="0",
        note=f"bit-equal on CPUs, with checkpoints; {NOT_RUN}",
    ),
    Argument(
        names=("overlap_cpu_optimizer_d2h_h2d",),
        field="optim.offload_overlap",
        on_gpus="on",
        on_cpus="on",
        note="with offload_fraction",
    ),
    Argument(
        names=("use_precision_aware_optimizer", "exp_avg_dtype"),
        field="optim.exp_avg_dtype",
        on_gpus="fp32",
        on_cpus="fp32",
        note="fp32 or bf16; TransformerEngine 2.1 or, without it and apex, our Adam; checkpoints are in fp32, so that "
        "runs with and without it read each other's, and bf16 resumes bit-equal on CPUs; fp16 and fp8 have a scale "
        f"that is computed anew when they are read; {NOT_RUN}",
    ),
    Argument(
        names=("exp_avg_sq_dtype",),
        field="optim.exp_avg_sq_dtype",
        on_gpus="fp32",
        on_cpus="fp32",
        note="as exp_avg_dtype",
    ),
    Argument(
        names=("main_grads_dtype", "grad_reduce_in_bf16"),
        field="optim.main_grads_dtype",
        on_gpus="fp32",
        on_cpus="fp32",
        note=f"as exp_avg_dtype; sums in bf16 depend on the mesh; {NOT_RUN}",
    ),
    Argument(
        names=("recompute_granularity", "recompute_activations"),
        field="platform.recompute",
        on_gpus="none",
        on_cpus="none",
        note="equal to without it on CPUs",
    ),
    Argument(
        names=("manual_gc", "manual_gc_interval"),
        field="train.gc_interval",
        on_gpus="100 with several ranks, in RL 1",
        on_cpus="none",
        note=f"changes no number; {NOT_RUN}",
    ),
    Argument(
        names=("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        note="Megatron's schedule for it interleaves the layers of two microbatches, while routing replay, the "
        "routers' losses and packed sequences are set for one microbatch at a time.",
    ),
    Argument(
        names=("fp8_param_gather", "fp8_param"),
        note="Weights would be in 8 bits, from which checkpoints, conversions and pushes of weights copy.",
    ),
    Argument(
        names=("fine_grained_activation_offloading", "offload_modules", "cpu_offloading_num_layers"),
        note="Megatron plans the copies by the passes of the first step, for all models of a process together, and "
        "0.16 does not go back to the plan's beginning after passes without a backward: the step after an evaluation "
        "finds none, as passes of a growing batch and of RL do in 0.19 too. The copies are TransformerEngine's, so "
        "that none of it runs on a CPU; platform.recompute frees the same memory.",
    ),
    Argument(
        names=("cuda_graph_impl", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph"),
        note="A graph repeats fixed shapes without Python: a layer with experts sends other numbers of tokens in every "
        "step, and replay records and imposes its routes in Python. Of attention alone Megatron captures graphs in the "
        "training loop of its scripts, after steps of warm-up: for sequences that are not packed, with random states "
        "that a graph can capture, while the hooks that wait for weights are off, and with a pipeline for the number "
        "of microbatches that the scripts have globally. None of it can be tried without a GPU.",
    ),
    Argument(
        names=("use_megatron_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy"),
        note="Its checkpoints have a format of their own, which other meshes and conversions do not read; mesh.ep and "
        "mesh.pp cut the weights, and the optimizer's state is cut over all copies.",
    ),
)


def argument_named(key: str) -> Argument | None:
    """Return the argument of Megatron-LM that the last part of a dotted key names, with dashes or without."""
    name = key.rpartition(".")[2].lstrip("-").replace("-", "_")
    return next((argument for argument in ARGUMENTS if name in argument.names), None)
