"""Checks that a model can be laid out on a mesh."""

from collections.abc import Iterator
from math import lcm

from mcore_rl.checks.model import divisors
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.families import family_of


def mesh_violations(
    model: ModelConfig, mesh: MeshConfig, seq_length: int, field: str = "data.seq_length"
) -> Iterator[str]:
    """Yield a sentence for each reason why `mesh` cannot hold `model` and sequences as long as `field` sets."""
    yield from _experts(model, mesh)
    yield from _parts(model, mesh)
    yield from _shared_choices(model, mesh)
    yield from _layers(model, mesh)
    yield from _pipeline(model, mesh)
    yield from _overlap(model, mesh)
    yield from _sequence(model, mesh, seq_length, field)


def unequal_length_violations(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    """Yield the reason why ranks with microbatches of different lengths cannot share experts, if any."""
    if model.is_moe and model.moe.dispatcher == "allgather" and mesh.etp * mesh.ep > mesh.tp * mesh.cp:
        yield (
            f'model.moe.dispatcher="allgather" with mesh.etp={mesh.etp} x mesh.ep={mesh.ep} over more than '
            f"the mesh.tp={mesh.tp} x mesh.cp={mesh.cp} ranks of one replica: it gathers as many tokens from each, and "
            'here replicas have sequences of different lengths. Set model.moe.dispatcher="alltoall".'
        )


def _experts(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    moe = model.moe
    if not model.is_moe:
        for name, size in (("ep", mesh.ep), ("etp", mesh.etp)):
            if size > 1:
                yield f"mesh.{name}={size}, but model.moe.num_experts=0: nothing to cut. Set mesh.{name}=1."
        return
    if moe.num_experts % mesh.ep:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not a multiple of mesh.ep={mesh.ep}: each rank holds as many "
            f"experts. Set mesh.ep to one of {divisors(moe.num_experts)}."
        )
    if mesh.tp > 1 and not mesh.sequence_parallel:
        yield (
            f"mesh.sequence_parallel=false with mesh.tp={mesh.tp} and experts: every tensor-parallel rank "
            "would send the same tokens to them. Set mesh.sequence_parallel=true."
        )
    if family_of(model).has_linear_bias and mesh.etp > 1:
        yield (
            f"mesh.etp={mesh.etp}: {model.family}'s experts have biases, which Megatron does not cut. "
            "Set mesh.etp=1 and use mesh.ep."
        )
    if moe.is_flex and mesh.ep * mesh.etp == 1:
        yield (
            f'model.moe.dispatcher="{moe.dispatcher}" with mesh.ep=1 and mesh.etp=1: no token travels. Set '
            'mesh.ep > 1, or model.moe.dispatcher="alltoall".'
        )


def _parts(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    moe, family, kv_heads, tp = model.moe, family_of(model), model.num_kv_heads, mesh.tp
    shared = "ffn_hidden_size" if moe.shared_ffn_hidden_size == "auto" else "shared_ffn_hidden_size"
    padded = "padded vocabulary (model.vocab_size, model.vocab_multiple) = "
    shared_width = moe.shared_width if moe.shared_experts else 0
    for name, size, axis, ranks in (
        (padded, model.padded_vocab_size, "tp", tp),
        ("model.ffn_hidden_size=", 0 if all(model.moe_layers) else model.ffn_hidden_size, "tp", tp),
        ("model.moe.ffn_hidden_size=", moe.ffn_hidden_size if model.is_moe else 0, "etp", mesh.etp),
        (f"model.moe.shared_experts x model.moe.{shared} = ", shared_width, "tp", tp),
        ("model.num_heads=", model.num_heads, "tp", tp),
    ):
        if size % ranks:
            yield (
                f"{name}{size} is not a multiple of mesh.{axis}={ranks}: all ranks hold equally large parts. Set "
                f"mesh.{axis} to one of {divisors(size)}, or change the model."
            )
    if family.has_full_qk_norm and kv_heads % tp:
        yield (
            f"model.num_kv_heads={kv_heads} is not a multiple of mesh.tp={tp}: {model.family} norms all keys at "
            f"once, so that no rank may hold a copy of another's. Set mesh.tp to one of {divisors(kv_heads)}."
        )
    # With fewer key/value heads than ranks, Megatron gives each rank a copy of the head it needs.
    elif not family.is_latent and not model.num_heads % tp and kv_heads % tp and tp % kv_heads:
        yield (
            f"model.num_kv_heads={kv_heads} is neither a multiple nor a divisor of mesh.tp={tp}. Set mesh.tp "
            f"to one of {divisors(kv_heads)}, or to a multiple of {kv_heads}."
        )
    if "delta" in model.mixers and model.delta.key_heads % (tp * mesh.cp):
        yield (
            f"model.delta.key_heads={model.delta.key_heads} is not a multiple of mesh.tp={tp} x mesh.cp="
            f"{mesh.cp}: a rank computes whole heads of gated delta nets. Set mesh.tp and mesh.cp so that their "
            f"product is one of {divisors(model.delta.key_heads)}."
        )


def _shared_choices(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    begin = 0
    for count in mesh.chunk_layers(model.num_layers, model.mtp_layers)[:-1] if mesh.pp > 1 else ():
        begin += count
        if 0 <= begin < model.num_layers and model.mixers[begin] == "shared":
            at = [str(layer) for layer, mixer in enumerate(model.mixers) if mixer == "indexed"]
            yield (
                f"Layer {begin}, the first of a chunk of mesh.pp={mesh.pp} x mesh.vpp={mesh.vpp}, takes the keys that "
                "a layer before it chooses (model.indexer.shared_layers), which is in another chunk. Set "
                "mesh.pp_layout, or mesh.first_stage_layers and mesh.last_stage_layers, so that each chunk begins with "
                f"one of the layers {', '.join(at)}."
            )
            return


def _layers(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    """Apply Megatron's rule: first and last stage as given, all other stages equal, each cut into vpp equal chunks."""
    if mesh.pp_layout is not None:
        yield from _layout(model, mesh)
        return
    # A stage without its own number of layers counts as an inner stage, so that 0 is right below.
    first, last, stages = mesh.first_stage_layers or 0, mesh.last_stage_layers or 0, mesh.pp
    if mesh.pp == 1 and (first or last):
        yield (
            f"mesh.first_stage_layers={toml_value(mesh.first_stage_layers)} and mesh.last_stage_layers="
            f'{toml_value(mesh.last_stage_layers)} with mesh.pp=1: there is one stage. Set both to "none".'
        )
        return
    for name, layers in (("first", first), ("last", last)):
        if layers % mesh.vpp:
            yield (
                f"mesh.{name}_stage_layers={layers} is not a multiple of mesh.vpp={mesh.vpp}: the chunks of "
                "a stage are equally long. Change one of them."
            )
    if mesh.vpp > 1 and mesh.pp == 2 and first and last:
        yield (
            f"mesh.first_stage_layers={first} and mesh.last_stage_layers={last} with mesh.pp=2 and mesh.vpp={mesh.vpp}"
            ": Megatron counts the layers of stages between the two, of which there are none. Set one of the fields to "
            '"none": that stage gets the rest.'
        )
    stages -= bool(first) + bool(last)
    middle = model.num_layers - first - last
    uneven = f" without the {first + last} of the first and last stage" if first or last else ""
    unit = stages * mesh.vpp
    if stages == 0 and middle:
        yield (
            f"mesh.first_stage_layers={first} + mesh.last_stage_layers={last} is not "
            f'model.num_layers={model.num_layers}, with mesh.pp=2. Set one of them to "none" to give it the rest.'
        )
    elif stages and (middle <= 0 or middle % unit):
        yield (
            f"model.num_layers={model.num_layers}{uneven} cannot be cut into {stages} stages "
            f"(mesh.pp={mesh.pp}) x mesh.vpp={mesh.vpp} equal chunks: {middle} is no positive multiple of "
            f"{unit}. Change mesh.pp or mesh.vpp, or give the first and last stage their own "
            "mesh.first_stage_layers, mesh.last_stage_layers."
        )


def _layout(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    layout = f"mesh.pp_layout={toml_value(mesh.pp_layout)}"
    if mesh.pp == 1:
        yield f'{layout} with mesh.pp=1: there is one stage. Set it to "none".'
        return
    for name, layers in (("first", mesh.first_stage_layers), ("last", mesh.last_stage_layers)):
        if layers is not None:
            yield (
                f"{layout} and mesh.{name}_stage_layers={layers}: both say how many layers a stage has. Set "
                f'mesh.{name}_stage_layers="none".'
            )
    num_chunks, chunks = mesh.pp * mesh.vpp, mesh.chunk_layers(model.num_layers, model.mtp_layers)
    if len(chunks) != num_chunks:
        yield (
            f"{layout} has {len(chunks)} numbers, and mesh.pp={mesh.pp} x mesh.vpp={mesh.vpp} are {num_chunks} chunks. "
            "Give one number for each, in the order of the model."
        )
    elif sum(chunks) != model.num_layers:
        yield (
            f"{layout} has {sum(chunks)} layers in all, and model.num_layers={model.num_layers}. Change one of them."
        )
    elif min(chunks[:-1]) < 1 or chunks[-1] < 0:
        yield (
            f"{layout} gives {model.num_layers} layers to {num_chunks} chunks as {chunks}: each but the last needs one "
            "or more. Use fewer mesh.pp or mesh.vpp."
        )


def _pipeline(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    if mesh.vpp > 1 and mesh.pp == 1:
        yield f"mesh.vpp={mesh.vpp} interleaves stages, but mesh.pp=1. Set mesh.vpp=1 or mesh.pp > 1."
    if mesh.vpp > 1 and mesh.pp == 2 and not mesh.overlap_p2p:
        yield (
            f"mesh.vpp={mesh.vpp} with mesh.pp=2 needs mesh.overlap_p2p=true: otherwise two messages between "
            "the same ranks are taken for each other and the loss is wrong. Set it, or use mesh.pp > 2."
        )
    if model.mtp_layers and mesh.pp > 1 and model.tied_embeddings:
        yield (
            f"model.mtp_layers={model.mtp_layers} with mesh.pp={mesh.pp} and model.tied_embeddings=true: "
            "Megatron cannot save the embedding that first and last stage then share. Untie the embeddings, "
            "or set mesh.pp=1."
        )


def _overlap(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    if mesh.overlap_shared_experts:
        reason = (
            "the model has no shared experts"
            if not (model.is_moe and model.moe.shared_experts)
            else "no token travels with mesh.ep=1 and mesh.etp=1"
            if mesh.ep * mesh.etp == 1
            else 'Megatron does it with model.moe.dispatcher="alltoall", "deepep" and "hybridep" only'
            if model.moe.dispatcher == "allgather"
            else ""
        )
        if reason:
            yield f"mesh.overlap_shared_experts=true, but {reason}. Set it to false."
    if mesh.overlap_param_gather is True and mesh.overlap_grad_reduce is False:
        yield (
            "mesh.overlap_param_gather=true needs mesh.overlap_grad_reduce=true: Megatron gathers parameters "
            'by the buckets of the reduction. Set both or neither, or mesh.overlap_grad_reduce="auto".'
        )


def _sequence(model: ModelConfig, mesh: MeshConfig, seq_length: int, field: str) -> Iterator[str]:
    if seq_length > model.max_position:
        yield (
            f"{field}={seq_length} is longer than model.max_position={model.max_position}. Shorten "
            "the sequences, or raise model.max_position (and see model.rope.scaling)."
        )
    slices = mesh.tp * mesh.cp if mesh.sequence_parallel else 1
    unit = lcm(mesh.zigzag, slices)
    if seq_length % unit:
        near = sorted({max(unit, seq_length - seq_length % unit), seq_length - seq_length % unit + unit})
        yield (
            f"{field}={seq_length} is not a multiple of {unit}: mesh.cp={mesh.cp} cuts it into "
            f"{mesh.zigzag} pieces and sequence parallelism (mesh.tp={mesh.tp}) a rank's part once more. Use "
            f"{' or '.join(map(str, near))}."
        )


def mesh_dependences(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a line of the log for each setting of a checked config that means something else on another mesh."""
    moe, train = config.model.moe, config.train
    if config.model.is_moe and isinstance(config, RlRunConfig):
        yield from _packed_by_tokens(moe, "rl.update.max_tokens_per_microbatch")
    elif config.model.is_moe and isinstance(config, PreferenceRunConfig):
        yield from _packed_by_tokens(moe, "data.tokens_per_microbatch")
    if not (config.model.is_moe and moe.balance == "global_aux_loss" and moe.aux_loss_coeff):
        return
    dp = world_size // config.mesh.model_parallel
    reason = (
        'warning: model.moe.balance="global_aux_loss" evens out the load over the micro-batches of a step so far, on '
        f"all {dp} data-parallel ranks"
    )
    if isinstance(config, RlRunConfig):
        yield (
            f"{reason}: the first micro-batches of a step see little of it, and another mesh.dp or packing trains "
            'differently. "seq_aux_loss" does not depend on either.'
        )
        return
    num_microbatches = train.global_batch // (train.micro_batch * dp)
    if num_microbatches > 1:
        yield (
            f"{reason}: with {num_microbatches} micro-batches a step on each rank the first sees 1/{num_microbatches} "
            f"of the batch, and another mesh.dp or train.micro_batch trains differently. With train.micro_batch="
            f'{train.micro_batch * num_microbatches} it is the whole batch; "seq_aux_loss" does not depend on the mesh.'
        )


def _packed_by_tokens(moe: MoEConfig, field: str) -> Iterator[str]:
    """Yield each setting that depends on which sequences share a microbatch packed up to `field` tokens."""
    if moe.balance == "aux_loss" and moe.aux_loss_coeff:
        yield (
            f'model.moe.balance="aux_loss" balances each microbatch, so that results depend slightly on the mesh and '
            f'on {field}. Use "seq_aux_loss", or model.moe.aux_loss_coeff=0, for results that depend on neither.'
        )
    if moe.capacity_factor is not None:
        yield (
            f"warning: model.moe.capacity_factor={moe.capacity_factor:g} drops the tokens that overfill an expert in a "
            f"microbatch, so that results depend on the mesh and on {field}. Unset, they depend on neither."
        )
