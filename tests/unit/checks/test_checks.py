"""Each rule, by a config that breaks it alone."""

import pytest

from mcore_rl.checks.run import check
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import ConfigError

EXPERTS = "model.moe.num_experts=8 model.moe.top_k=2 model.moe.ffn_hidden_size=64"
DEEPSEEK = (
    "model.moe.num_experts=16 model.moe.top_k=4 model.moe.ffn_hidden_size=64 model.moe.shared_experts=1 "
    "model.moe.num_groups=4 model.moe.top_groups=2 model.moe.expert_bias=true model.moe.routed_scaling=2.5 "
    "model.moe.first_dense_layers=1"
)
DELTA = "model.delta.full_every=4 model.delta.key_heads=4 model.delta.value_heads=8 model.rope.fraction=0.25"
INDEXER = "model.indexer.top_k=4096 model.indexer.width=64 model.mla.q_lora_rank=32"
FAMILIES = {
    "llama": "",
    "qwen2": "",
    "qwen3": "",
    "qwen3_moe": EXPERTS,
    "qwen2_moe": f"{EXPERTS} model.moe.shared_experts=1 model.moe.normalize_top_k=false",
    "mixtral": EXPERTS,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": f"{EXPERTS} model.sliding_window=16 model.rope.scaling=yarn model.rope.truncate=false",
    "olmoe": f"{EXPERTS} model.moe.normalize_top_k=false",
    "deepseek_v2": f"{DEEPSEEK} model.moe.expert_bias=false model.moe.top_k=2 model.moe.normalize_top_k=false",
    "glm4_moe": f"{DEEPSEEK} model.rope.fraction=0.5",
    "glm4_moe_lite": DEEPSEEK,
    "deepseek_v32": f"{DEEPSEEK} {INDEXER}",
    "glm_moe_dsa": f"{DEEPSEEK} {INDEXER} model.indexer.shared_layers=[2]",
    "dots1": DEEPSEEK,
    "solar_open": f"{DEEPSEEK} model.moe.first_dense_layers=0",
    "minimax_m2": f"{EXPERTS} model.moe.expert_bias=true model.rope.fraction=0.5",
    "seed_oss": "",
    "mistral": "",
    "qwen3_next": f"{EXPERTS} model.moe.shared_experts=1 {DELTA}",
    "qwen3_5_moe_text": f"{EXPERTS} model.moe.shared_experts=1 {DELTA}",
    "qwen3_5_text": DELTA,
}

REMEDIES = "Change Choose Give Leave Lower Make Name Set Shorten Start Take Untie Use Warm".split()


def violations(family, overrides="", world_size=None):
    words = f"model.family={family} {FAMILIES[family]} data.train=[text] {overrides}".split()
    config = load_config(PretrainConfig, None, words)
    try:
        check(config, world_size or config.mesh.smallest_world)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family):
    assert violations(family) == []


@pytest.mark.parametrize(
    ("family", "overrides", "world_size"),
    [
        ("qwen3_moe", "mesh.tp=2 mesh.ep=2", 2),
        ("qwen3_moe", "mesh.tp=2 mesh.ep=4 mesh.dp=auto", 4),
        ("qwen3_moe", "mesh.tp=2 mesh.etp=2 mesh.ep=2 mesh.dp=2", 4),
        ("qwen3_moe", "mesh.pp=2 mesh.vpp=2", 2),
        ("qwen3_moe", "mesh.cp=2 mesh.tp=2 data.seq_length=8", 4),
        ("qwen3_moe", "mesh.tp=8", 8),
        ("qwen3_moe", "model.moe.top_k=1 model.moe.normalize_top_k=false", 1),
        ("qwen3_moe", "mesh.pp=3 mesh.first_stage_layers=1 mesh.last_stage_layers=1", 3),
        ("qwen3_moe", "mesh.pp=2 mesh.vpp=2 mesh.pp_layout=[2,1,1,0]", 2),
        ("qwen3_moe", "mesh.pp=2 mesh.vpp=2 mesh.pp_layout=balanced", 2),
        ("qwen3", "mesh.tp=2 mesh.sequence_parallel=false data.seq_length=7", 2),
        ("deepseek_v3", "mesh.pp=2 model.mtp_layers=1", 2),
        ("deepseek_v3", "mesh.pp=1 model.mtp_layers=1 model.tied_embeddings=true", 1),
        ("deepseek_v3", "model.num_kv_heads=3", 1),
        ("deepseek_v3", "model.moe.top_k=6", 1),  # three a group, which is ranked by its best 2
        ("deepseek_v2", "model.moe.top_k=4", 1),
        ("deepseek_v3", "model.moe.num_groups=1 model.moe.top_groups=1 model.moe.top_k=6", 1),
        ("llama", "train.global_batch=32 train.ramp_start=8 train.ramp_increment=12 train.ramp_samples=100", 1),
        ("llama", "optim.schedule=wsd optim.warmup_steps=90", 1),
        ("llama", "model.rope.scaling=llama3 model.rope.factor=8 model.rope.original_length=8192", 1),
        ("qwen2_moe", "model.moe.shared_ffn_hidden_size=96 mesh.tp=2 mesh.etp=2", 2),
        ("glm4_moe", "model.qkv_bias=off model.qk_norm=on mesh.pp=2 model.mtp_layers=1", 2),
        ("llama", "data.split=[1,0,0] train.eval_batches=none", 1),
        ("llama", "platform.recompute=full platform.recompute_modules=[moe]", 1),
        ("llama", "mesh.overlap_param_gather=true mesh.overlap_grad_reduce=true", 1),
        ("llama", "mesh.overlap_param_gather=true", 1),
        ("llama", "platform.cross_entropy_fusion=native platform.precision=bf16", 1),
        ("qwen3_moe", "platform.fp8=hybrid platform.recompute=selective platform.recompute_modules=[moe_act]", 1),
    ],
)
def test_settings_that_agree_pass(family, overrides, world_size):
    assert violations(family, overrides, world_size) == []


@pytest.mark.parametrize(
    ("family", "overrides", "world_size", "message"),
    [
        ("qwen3_moe", "", 4, "has 4 ranks, but mesh.tp=1 x pp=1 x cp=1 x dp=1 takes 1. Start so many"),
        ("qwen3_moe", "mesh.tp=2 mesh.dp=auto", 3, "Start 2, 4, 6 or another multiple of 2"),
        ("qwen3_moe", "mesh.tp=2 mesh.ep=4 mesh.dp=auto train.global_batch=12", 6, "Start 4, 8, 12"),
        (
            "qwen3_moe",
            "mesh.tp=2 mesh.ep=4 mesh.dp=3 train.global_batch=12 train.global_batch=12",
            6,
            "Set mesh.dp to a multiple of 2",
        ),
        ("qwen3_moe", "mesh.ep=3 mesh.dp=3 train.global_batch=12", 3, "num_experts=8 is not a multiple of mesh.ep=3"),
        ("qwen3_moe", "mesh.tp=2 mesh.sequence_parallel=false", 2, "Set mesh.sequence_parallel=true"),
        ("qwen3_moe", "model.moe.dispatcher=deepep", 1, "Set mesh.ep > 1"),
        ("qwen3_moe", "model.moe.dispatcher=hybridep", 1, "Set mesh.ep > 1"),
        ("llama", "run_dir=~/runs/x", 1, 'the run would write to a folder of the name "~"'),
        ("llama", "mesh.ep=2 mesh.dp=2", 2, "mesh.ep=2, but model.moe.num_experts=0"),
        ("llama", "mesh.etp=2 mesh.tp=2", 2, "mesh.etp=2, but model.moe.num_experts=0"),
        ("llama", "model.ffn_hidden_size=511 mesh.tp=2", 2, "model.ffn_hidden_size = 511"),
        ("llama", "model.vocab_size=5 model.vocab_multiple=1 mesh.tp=2", 2, "padded vocabulary"),
        ("qwen3_moe", "mesh.etp=3 mesh.dp=3 train.global_batch=12", 3, "model.moe.ffn_hidden_size = 64"),
        (
            "deepseek_v3",
            "model.moe.ffn_hidden_size=63 mesh.tp=2",
            2,
            "model.moe.shared_experts x model.moe.ffn_hidden_size = 63",
        ),
        ("llama", "model.num_heads=6 model.num_kv_heads=2 mesh.tp=4", 4, "of 1, 2, 3, 6"),
        ("llama", "model.num_heads=12 model.num_kv_heads=6 mesh.tp=4", 4, "num_kv_heads=6 is neither"),
        ("llama", "model.num_kv_heads=3", 1, "num_heads=8 is not a multiple of model.num_kv_heads=3"),
        ("llama", "model.head_dim=33", 1, "model.head_dim=33 is odd"),
        ("deepseek_v3", "model.mla.qk_rope_head_dim=7", 1, "qk_rope_head_dim=7 is odd"),
        ("llama", "mesh.pp=3", 3, "model.num_layers=4 cannot be cut into 3 stages"),
        ("llama", "mesh.pp=2 mesh.vpp=4", 2, "mesh.vpp=4 equal chunks"),
        ("llama", "mesh.first_stage_layers=1", 1, "mesh.pp=1: there is one stage"),
        (
            "llama",
            "mesh.pp=2 mesh.first_stage_layers=1 mesh.last_stage_layers=2",
            2,
            "is not model.num_layers=4, with mesh.pp=2",
        ),
        ("llama", "mesh.pp=3 mesh.first_stage_layers=2 mesh.last_stage_layers=2", 3, "0 is no positive multiple"),
        (
            "llama",
            "mesh.pp=2 mesh.vpp=2 mesh.first_stage_layers=3 model.num_layers=5",
            2,
            "first_stage_layers=3 is not a multiple of mesh.vpp=2",
        ),
        ("llama", "mesh.pp_layout=[4]", 1, "mesh.pp_layout=[4] with mesh.pp=1: there is one stage"),
        ("llama", "mesh.pp=2 mesh.pp_layout=[2,1,1]", 2, "has 3 numbers, and mesh.pp=2 x mesh.vpp=1 are 2 chunks"),
        ("llama", "mesh.pp=2 mesh.pp_layout=[2,3]", 2, "has 5 layers in all, and model.num_layers=4"),
        ("llama", "mesh.pp=2 mesh.pp_layout=[0,4]", 2, "as [0, 4]: each but the last needs one or more"),
        ("llama", "mesh.pp=2 mesh.vpp=4 mesh.pp_layout=balanced", 2, "each but the last needs one or more"),
        ("llama", "mesh.pp=2 mesh.pp_layout=[3,1] mesh.last_stage_layers=1", 2, "both say how many layers a stage has"),
        ("llama", "mesh.vpp=2", 1, "but mesh.pp=1"),
        ("llama", "mesh.pp=2 mesh.vpp=2 mesh.overlap_p2p=false", 2, "needs mesh.overlap_p2p=true"),
        ("deepseek_v3", "model.mtp_layers=1 mesh.pp=2 model.tied_embeddings=true", 2, "Untie the embeddings"),
        (
            "llama",
            "mesh.overlap_param_gather=true mesh.overlap_grad_reduce=false",
            1,
            "needs mesh.overlap_grad_reduce=true",
        ),
        ("llama", "data.seq_length=5000", 1, "longer than model.max_position=4096"),
        ("llama", "mesh.cp=2 data.seq_length=6", 2, "not a multiple of 4: mesh.cp=2"),
        ("llama", "mesh.tp=2 data.seq_length=7", 2, "Use 6 or 8"),
        ("llama", "mesh.tp=4 mesh.cp=2 data.seq_length=12", 8, "not a multiple of 8"),
        ("llama", "train.micro_batch=3", 1, "Use 6 or 9"),
        ("llama", "mesh.dp=3", 3, "train.micro_batch=1 x 3 data-parallel ranks = 3"),
        ("llama", "mesh.pp=4 mesh.vpp=1 train.micro_batch=16", 4, "train.global_batch=8 is not a multiple"),
        ("llama", "mesh.pp=2 mesh.vpp=2 train.micro_batch=8", 2, "microbatches go round in groups of pp"),
        ("llama", "train.ramp_start=4", 1, "needs all three"),
        ("llama", "train.ramp_start=4 train.ramp_increment=3 train.ramp_samples=9", 1, "no number of increments"),
        ("llama", "train.ramp_start=8 train.ramp_increment=1 train.ramp_samples=9", 1, "no number of increments"),
        (
            "llama",
            "train.micro_batch=4 train.ramp_start=4 train.ramp_increment=2 train.ramp_samples=9",
            1,
            "train.ramp_increment=2 is not a multiple",
        ),
        ("llama", "optim.min_lr=1", 1, "optim.min_lr=1.0 is above optim.lr=0.0003"),
        ("llama", "optim.warmup_steps=100", 1, "does not end before train.steps=100"),
        ("llama", "optim.warmup_steps=20 optim.decay_steps=10", 1, "does not end before optim.decay_steps=10"),
        ("llama", "optim.schedule=wsd optim.warmup_steps=91", 1, "do not both fit before train.steps=100"),
        ("llama", "optim.schedule=wsd optim.wsd_decay_steps=101", 1, "do not both fit"),
        ("llama", "data.train=[]", 1, "data.train is empty"),
        ("llama", "data.train_weights=[1,2]", 1, "has 2 weights for 1 prefixes"),
        ("llama", "data.train_weights=[0]", 1, "a weight is above 0"),
        ("llama", "data.split=[0,1,1]", 1, "training needs one"),
        ("llama", "data.split=[2,-1,1]", 1, "no share is negative"),
        ("llama", "data.split=[1,0,0]", 1, "nothing to evaluate on"),
        ("llama", "data.tokenizer.kind=huggingface", 1, "has no path"),
        ("llama", "data.tokenizer.kind=none data.tokenizer.path=x", 1, 'not read with data.tokenizer.kind="none"'),
        ("llama", "model.moe.num_experts=4 model.moe.ffn_hidden_size=8", 1, '"llama" is dense'),
        ("mixtral", "model.moe.num_experts=0", 1, "is a Mixture of Experts"),
        ("qwen3_moe", "model.mtp_layers=1", 1, "supported by deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, "),
        ("qwen3_moe", "model.moe.ffn_hidden_size=0", 1, "an expert has no width"),
        ("qwen3_moe", "model.moe.top_k=9", 1, "more than model.moe.num_experts=8"),
        ("qwen3_moe", "model.moe.first_dense_layers=4", 1, "leaves none of model.num_layers=4"),
        ("qwen3_moe", "model.moe.top_k=1", 1, "it would not learn"),
        ("deepseek_v3", "model.moe.normalize_top_k=false", 1, "always sum to one"),
        (
            "qwen3_moe",
            "model.moe.shared_experts=1",
            1,
            "shared_experts=1 is supported by deepseek_v2, deepseek_v3, deepseek_v32, dots1, glm4_moe, glm4_moe_lite, "
            "glm_moe_dsa, qwen2_moe, qwen3_5_moe_text, qwen3_next, solar_open only",
        ),
        ("mixtral", "model.moe.expert_bias=true", 1, "Set it to false"),
        ("mixtral", "model.moe.routed_scaling=2", 1, "Set it to 1.0"),
        ("qwen2_moe", "model.moe.shared_experts=2", 1, "qwen2_moe has one shared expert"),
        ("gpt_oss", "mesh.tp=2 mesh.etp=2", 2, "Set mesh.etp=1"),
        ("gpt_oss", "model.moe.first_dense_layers=1", 1, 'not by model.family="gpt_oss"'),
        ("qwen3_moe", "model.sliding_window=16", 1, "supported by gpt_oss only"),
        ("gpt_oss", "model.rope.scaling=none", 1, "rope.truncate=false is supported by YaRN"),
        ("olmoe", "model.num_kv_heads=2 mesh.tp=4", 4, "olmoe norms all keys at once"),
        ("deepseek_v2", "model.moe.normalize_top_k=true", 1, "are the softmax's probabilities"),
        ("deepseek_v2", "model.moe.expert_bias=true", 1, "supported by deepseek_v3, deepseek_v32, dots1, glm4_moe, "),
        ("qwen2", "model.qkv_bias=off", 1, 'model.family="qwen2" always has them'),
        ("qwen3", "model.qkv_bias=on", 1, 'model.family="qwen3" never has them'),
        ("llama", "model.qk_norm=on", 1, 'model.qk_norm="on"'),
        (
            "llama",
            "model.rope.fraction=0.5",
            1,
            "rope.fraction=0.5 is supported by glm4_moe, minimax_m2, qwen3_5_moe_text, qwen3_5_text, qwen3_next only",
        ),
        ("qwen3_moe", "model.delta.full_every=4", 1, "full_every=4 is supported by qwen3_5_moe_text, qwen3_5_text, "),
        ("qwen3_5_text", "model.delta.full_every=none", 1, "most of its layers are gated delta nets"),
        ("qwen3_5_text", "model.delta.value_heads=6", 1, "is not a multiple of model.delta.key_heads=4"),
        ("qwen3_next", "mesh.tp=4 mesh.cp=2", 8, "key_heads=4 is not a multiple of mesh.tp=4 x mesh.cp=2"),
        ("qwen3_next", "platform.batch_invariant=true platform.layers=torch", 1, "computed by torch, in chunks"),
        ("qwen3_next", "platform.layers=te platform.precision=bf16 platform.device=cuda", 1, "gated delta nets are"),
        ("glm_moe_dsa", "mesh.pp=2", 2, "Layer 2, the first of a chunk of mesh.pp=2 x mesh.vpp=1, takes the keys"),
        ("deepseek_v32", "model.indexer.top_k=none", 1, 'top_k="none" with model.family="deepseek_v32"'),
        ("deepseek_v32", "model.indexer.shared_layers=[1]", 1, "every layer of deepseek_v32 has an indexer"),
        ("glm_moe_dsa", "model.indexer.shared_layers=[9]", 1, "there are no layers [9]"),
        ("deepseek_v32", "data.seq_length=1024 model.indexer.top_k=512", 1, "indexers are not trained here"),
        ("deepseek_v32", "platform.layers=te platform.device=cuda", 1, "whose attention over chosen keys is"),
        ("deepseek_v32", "lora.rank=4", 1, "adapters of attention over chosen keys"),
        ("deepseek_v3", "model.indexer.top_k=512", 1, "is supported by deepseek_v32, glm_moe_dsa only"),
        ("qwen3_next", "lora.rank=4", 1, "there are no adapters of gated delta nets"),
        ("qwen3_5_text", "model.mtp_layers=2", 1, "qwen3_5_text has one"),
        ("qwen3_5_moe_text", "model.moe.normalize_top_k=false", 1, "always norms its gates"),
        ("glm4_moe", "model.rope.fraction=0.1", 1, "x model.rope.fraction=0.1 is odd"),
        ("glm4_moe", "model.rope.scaling=yarn model.rope.factor=4", 1, "Megatron's YaRN turns whole heads"),
        ("glm4_moe", "model.moe.num_groups=16 model.moe.top_groups=8", 1, "glm4_moe ranks it by its best 2"),
        (
            "qwen2_moe",
            "model.moe.shared_ffn_hidden_size=63 mesh.tp=2",
            2,
            "model.moe.shared_experts x model.moe.shared_ffn_hidden_size = 63",
        ),
        ("deepseek_v3", "model.moe.top_groups=none", 1, "needs both"),
        ("deepseek_v3", "model.moe.num_groups=3", 1, "not a multiple of model.moe.num_groups=3"),
        ("deepseek_v3", "model.moe.top_groups=5", 1, "not so many groups"),
        ("deepseek_v3", "model.moe.num_groups=16 model.moe.top_groups=1 model.moe.top_k=2", 1, "leave 1 experts"),
        ("llama", "model.rope.factor=2", 1, "has no effect"),
        ("llama", "model.rope.scaling=yarn model.rope.factor=0.5", 1, "would shrink"),
        ("llama", "model.rope.scaling=llama3 model.rope.factor=8", 1, "8192 built in"),
        ("deepseek_v3", "model.rope.scaling=llama3 model.rope.factor=8", 1, "not supported by deepseek_v3"),
        ("llama", "platform.device=cpu platform.layers=te", 1, 'platform.layers="te" needs CUDA'),
        ("llama", "platform.device=cpu platform.fp8=hybrid", 1, 'platform.fp8="hybrid" needs CUDA'),
        ("llama", "platform.layers=torch platform.fp8=hybrid", 1, "needs TransformerEngine"),
        ("llama", "optim.offload_fraction=0.5", 1, 'optim.offload_fraction=0.5 with platform.precision="fp32"'),
        (
            "llama",
            "platform.fp8=hybrid platform.fp8_recipe=blockwise model.ffn_hidden_size=1000",
            1,
            'model.ffn_hidden_size = 1000 is not a multiple of 16, as platform.fp8_recipe="blockwise" needs of the '
            "widths on a rank. Make it 992 or 1008",
        ),
        (
            "qwen3_moe",
            "platform.fp8=hybrid platform.fp8_recipe=mxfp8 mesh.etp=2 mesh.dp=2 model.moe.ffn_hidden_size=96",
            2,
            "model.moe.ffn_hidden_size = 96 / mesh.etp=2 = 48 is not a multiple of 32, as "
            'platform.fp8_recipe="mxfp8" needs of the widths on a rank. Make it 64 or 128',
        ),
        (
            "llama",
            "platform.fp8=hybrid data.seq_length=72 mesh.tp=2",
            2,
            "data.seq_length=72 x train.micro_batch=1 on 2 ranks are 36 tokens each, not a multiple of 32, as "
            'platform.fp8_recipe="auto", which is mxfp8 on Blackwell, needs. Make data.seq_length 64 or 128',
        ),
        ("llama", "optim.exp_avg_sq_dtype=bf16", 1, 'exp_avg_sq_dtype="bf16" with platform.precision="fp32"'),
        (
            "llama",
            "optim.exp_avg_dtype=bf16 optim.offload_fraction=0.5 platform.precision=bf16",
            1,
            'optim.exp_avg_dtype="bf16" with optim.offload_fraction=0.5',
        ),
        ("gpt_oss", "platform.batch_invariant=true", 1, "has neither sinks nor dropout"),
        ("llama", "platform.batch_invariant=true platform.layers=te", 1, "chooses its kernels by the number of rows"),
        ("llama", "platform.batch_invariant=true platform.layers=cpu", 1, "multiply all rows of an expert at once"),
        ("llama", "platform.bf16_products=true platform.layers=torch", 1, "only the compiled layers"),
        ("llama", "platform.layers=cpu platform.device=cuda", 1, "these layers are compiled for CPUs"),
        ("llama", "platform.layers=cpu platform.precision=bf16", 1, "compute tensors in fp32"),
        ("llama", "platform.bf16_products=true platform.precision=bf16", 1, "compute tensors in fp32"),
        (
            "qwen3_moe",
            "platform.device=cpu model.moe.dispatcher=deepep mesh.ep=2 mesh.dp=2",
            2,
            'model.moe.dispatcher="deepep" needs CUDA',
        ),
        (
            "qwen3_moe",
            "platform.device=cpu model.moe.dispatcher=hybridep mesh.ep=2 mesh.dp=2",
            2,
            'model.moe.dispatcher="hybridep" needs CUDA',
        ),
        ("llama", "platform.recompute=selective platform.recompute_modules=[]", 1, "without platform.recomp"),
        ("llama", "platform.recompute=selective platform.recompute_modules=[moe]", 1, 'names "moe"'),
        ("qwen3_moe", "platform.recompute=selective platform.recompute_modules=[mlp]", 1, 'names "mlp"'),
        ("qwen3_moe", "platform.recompute=selective platform.recompute_modules=[mla_up_proj]", 1, "mla_up"),
        ("qwen3_moe", "platform.recompute=selective platform.recompute_modules=[shared_experts]", 1, "shared_"),
        (
            "qwen3_moe",
            "platform.fp8=hybrid platform.fp8_recipe=delayed platform.recompute=selective "
            "platform.recompute_modules=[moe_act]",
            1,
            "cannot recompute",
        ),
        ("llama", "mesh.overlap_tp=true platform.precision=bf16", 1, "mesh.tp=1 sends nothing"),
        ("llama", "mesh.overlap_tp=true mesh.tp=2", 2, "the buffers are bf16"),
        (
            "llama",
            "mesh.overlap_tp=true mesh.tp=2 platform.precision=bf16 mesh.sequence_parallel=false",
            2,
            "what overlaps are its gathers",
        ),
        (
            "deepseek_v3",
            "mesh.overlap_tp=true mesh.tp=2 platform.precision=bf16",
            2,
            "latent attention has projections for which Megatron switches it off",
        ),
        (
            "llama",
            "mesh.overlap_tp=true mesh.tp=2 platform.precision=bf16 platform.device=cpu",
            2,
            'platform.device="cpu" has no user buffers',
        ),
        ("qwen3_moe", "mesh.overlap_shared_experts=true mesh.ep=2 mesh.dp=2", 2, "has no shared experts"),
        ("deepseek_v3", "mesh.overlap_shared_experts=true", 1, "no token travels with mesh.ep=1"),
        (
            "deepseek_v3",
            "mesh.overlap_shared_experts=true mesh.ep=2 mesh.dp=2 model.moe.dispatcher=allgather",
            2,
            'Megatron does it with model.moe.dispatcher="alltoall"',
        ),
        (
            "deepseek_v3",
            "mesh.overlap_shared_experts=true mesh.ep=2 mesh.dp=2 platform.recompute=selective "
            "platform.recompute_modules=[shared_experts]",
            2,
            "cannot compute them again in parts",
        ),
        ("llama", "platform.fp8_recipe=mxfp8", 1, "nothing is computed in 8 bits"),
        ("qwen3_moe", "platform.permute_fusion=true platform.layers=torch", 1, "permute_fusion=true with"),
        ("qwen3_moe", "platform.router_fusion=true platform.device=cpu", 1, "router_fusion=true needs CUDA"),
        ("llama", "platform.weight_gradient_fusion=true platform.layers=torch", 1, "weight_gradient_fusion=tr"),
        ("llama", "platform.cross_entropy_fusion=native", 1, "rounds the gradient of the logits to bf16"),
        (
            "llama",
            "platform.cross_entropy_fusion=te platform.layers=torch platform.precision=bf16",
            1,
            "it is a kernel of TransformerEngine",
        ),
    ],
)
def test_a_disagreement_is_told_alone_and_with_a_remedy(family, overrides, world_size, message):
    lines = violations(family, overrides, world_size)
    assert [message in line for line in lines] == [True], lines
    assert lines[0].split(". ")[-1].split()[0] in REMEDIES


def test_all_disagreements_are_told_at_once():
    lines = violations("qwen3_moe", "mesh.tp=3 mesh.pp=3 train.micro_batch=5 optim.min_lr=1")
    wanted = ("num_heads", "num_layers", "global_batch", "min_lr", "padded vocabulary", "seq_length")
    assert len(lines) == len(wanted) and all(any(word in line for line in lines) for word in wanted)


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r'model.family="gpt2" is not known. Use one of .*qwen3_moe'):
        check(load_config(PretrainConfig, None, ["model.family=gpt2", "data.train=[text]"]), 1)
