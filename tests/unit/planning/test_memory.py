"""A route takes a byte for each expert, or two, and goes to the memory that the config names."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig, MoEConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.families import FAMILIES
from mcore_rl.megatron.platform import Platform
from mcore_rl.planning.activations import LayerActivations, load_of_fullest_rank
from mcore_rl.planning.memory import (
    GIB,
    RouteBytes,
    device_memory_lines,
    disk_of,
    disk_warning,
    layer_bytes,
    memory_by_stage,
    memory_of_fullest_rank,
    routes_of_rank,
)
from mcore_rl.planning.training import training_of
from mcore_rl.planning.weights import layer_weights, layers_by_stage, weights_by_stage
from mcore_rl.programs import open_run
from tests.tiny_models import TINY
from tests.weight_numbers import numbers_by_stage

MOE, DENSE = LayerKind("attention", True), LayerKind("attention", False)
RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
QWEN3 = RECIPES / "qwen3_30b_a3b" / "pretrain.toml"


def saved_numbers(weights):
    """Of a router's two buffers a checkpoint has one: the bias, and not the load since the last step."""
    return weights.total + weights.fp32_buffers


def config(*overrides, path=QWEN3):
    return load_config(PretrainConfig, path, overrides)


def training(*overrides, world=16, length=4096):
    return replace(training_of(config(*overrides), world), seq_length=length)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(), MeshConfig(tp=2), MeshConfig(ep=2, etp=2), MeshConfig(pp=2)],
    ids=["1", "tp2", "ep2-etp2", "pp2"],
)
def test_the_weights_of_a_rank_are_those_of_the_tensors_that_it_gets(family, mesh):
    model = TINY[family]
    if not model.is_moe:
        mesh = mesh.model_copy(update={"ep": 1, "etp": 1})
    elif family == "gpt_oss":
        mesh = mesh.model_copy(update={"etp": 1})  # its experts' biases are not cut
    if mesh.pp > 1:
        first = model.num_layers // 2
        mesh = mesh.model_copy(update={"first_stage_layers": first, "last_stage_layers": model.num_layers - first})
    assert [saved_numbers(stage) for stage in weights_by_stage(model, mesh)] == numbers_by_stage(model, mesh)


def test_a_rank_has_a_part_of_a_key_value_head_where_there_are_fewer_than_ranks():
    layers = [layer_weights(config().model, MeshConfig(tp=tp, ep=8), MOE).dense for tp in (4, 8)]
    # 4 of 32 query heads, of width 128, and their output; half of a key head and half of a value head.
    assert layers[0] - layers[1] == (2 * 4 + 1) * 128 * 2048


def test_layers_are_dealt_out_in_rounds_of_chunks():
    model = config().model.model_copy(update={"num_layers": 10})
    mesh = MeshConfig(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=4)
    assert layers_by_stage(model, mesh) == [[0, 5], [1, 2, 6, 7], [3, 4, 8, 9]]


def test_balanced_chunks_count_embedding_output_and_multi_token_prediction_as_layers():
    # As published: DeepSeek-V3's 61 layers and one of multi-token prediction on pp 16 x vpp 2, Qwen3-235B's 94 on
    # pp 8 x vpp 4. Without such a layout neither can be interleaved.
    deepseek = MeshConfig(pp=16, vpp=2, pp_layout="balanced").chunk_layers(61, 1)
    assert deepseek == [1, *[2] * 30, 0]
    assert MeshConfig(pp=8, vpp=4, pp_layout="balanced").chunk_layers(94) == [2, *[3] * 30, 2]
    # What is left over goes to whole rounds, then to the last stages.
    assert MeshConfig(pp=3, vpp=2, pp_layout="balanced").chunk_layers(14) == [2, 3, 3, 2, 2, 2]
    assert MeshConfig(pp=4, pp_layout="balanced").chunk_layers(12) == [2, 3, 4, 3]


def test_activations_of_a_layer_are_those_counted_by_hand():
    """4096 tokens, hidden 2048, tp 2 with sequence parallelism, bf16; 32 heads and 4 key/value heads of 128."""
    layer = LayerActivations(config().model, config().mesh, PlatformConfig(precision="bf16"), 4096)
    tokens = 4096 * 2
    assert layer.all_parts(MOE) == {
        "inputs": 2 * tokens * 2048 // 2,
        "normed": 2 * tokens * 2048 // 2,
        "unnormed_queries_keys": tokens * (16 + 2) * 128,
        "queries_keys_values": tokens * (16 + 2 + 2) * 128,
        "attended": tokens * 16 * 128,
        "router": 2048 * 128 * 4,
        "routed_in": 8 * tokens // 2 * 2048,
        "routed_up": 8 * tokens // 2 * 2 * 768,
        "routed_act": 8 * tokens // 2 * 768,
        "shared_up": 0,
        "shared_act": 0,
    }


def test_a_rank_whose_experts_get_more_tokens_keeps_more_of_them_up_to_their_capacity():
    """4096 tokens, top-8, tp 2: 16,384 routed rows in the mean, of 2048 + 2 x 768 numbers, in each of 48 layers, which
    compute the activation again.
    """
    even, fuller = (memory_by_stage(training(), load)[0] for load in (1.0, 1.3))
    assert fuller.activations - even.activations == 48 * (int(16384 * 1.3) - 16384) * (2048 + 2 * 768) * 2
    assert fuller.permanent == even.permanent
    # No expert takes more than 1.1 times the mean; and with ep 1 every rank has all experts.
    model = config().model
    model = model.model_copy(update={"moe": model.moe.model_copy(update={"capacity_factor": 1.1})})
    assert load_of_fullest_rank(model, MeshConfig(ep=8), 1.3) == 1.1
    assert load_of_fullest_rank(config().model, MeshConfig(ep=1), 1.3) == 1.0


def test_latent_attention_keeps_expanded_heads_and_latents_of_both_sides_of_their_norms():
    """4096 tokens, tp 2: 64 of 128 heads of 192 and 128, latents of 1536 and 512 + 64, bf16."""
    model = config(path=RECIPES / "deepseek_v3" / "pretrain.toml").model
    layer = LayerActivations(model, MeshConfig(tp=2, ep=64), PlatformConfig(precision="bf16"), 4096)
    parts = layer.all_parts(DENSE)
    assert parts["latents"] == 2048 * 2 * (2 * 1536 + 2 * 512 + 64)
    assert parts["queries_keys_values"] == 4096 * 2 * 64 * (192 + 192 + 128)
    assert (parts["attended"], parts["act"]) == (4096 * 2 * 64 * 128, 4096 * 2 * 18432 // 2)


@pytest.mark.parametrize(
    ("modules", "gone"),
    [
        (("core_attn",), ()),
        (("moe_act",), ("routed_act",)),
        (("layernorm", "moe_act"), ("normed", "routed_act")),
        (("moe",), ("router", "routed_in", "routed_up", "routed_act")),
    ],
)
def test_selective_recomputation_drops_its_modules_and_keeps_the_rest(modules, gone):
    platform = PlatformConfig(precision="bf16", recompute="selective", recompute_modules=modules)
    layer = LayerActivations(config().model, config().mesh, platform, 4096)
    parts = layer.all_parts(MOE)
    assert layer.kept(MOE) == sum(parts.values()) - sum(parts[part] for part in gone)


def test_full_recomputation_keeps_the_inputs_of_layers_and_one_layer_of_the_rest():
    memory = memory_of_fullest_rank(training("platform.recompute=full"))
    layer = LayerActivations(config().model, config().mesh, config().platform, 4096)
    assert memory.activations == 48 * 4096 * 2048 * 2 // 2
    assert memory.recomputed == sum(layer.all_parts(MOE).values())
    wider = memory_of_fullest_rank(training("platform.recompute=full", "platform.recompute_layers=4"))
    assert (wider.activations, wider.recomputed) == (memory.activations // 4, 4 * memory.recomputed)


def test_context_parallel_ranks_share_tokens_and_optimizer_and_hold_the_same_weights():
    one = memory_of_fullest_rank(training("mesh.dp=8"))
    two = memory_of_fullest_rank(training("mesh.dp=4", "mesh.cp=2"))
    assert (two.weights, two.gradients, two.optimizer) == (one.weights, one.gradients, one.optimizer)
    assert (two.activations, two.logits) == (one.activations // 2, one.logits // 2)


def test_the_output_and_its_logits_are_the_last_stages():
    first, second = memory_by_stage(training("mesh.pp=2", world=32))
    assert first.logits == 0
    assert second.logits == 4096 * 151936 // 2 * (2 + 4 + 4)
    assert first.activations == 2 * second.activations


def test_a_push_gathers_a_ranks_own_experts_and_whole_layers_on_a_rank_that_is_alone():
    """By files a layer is gathered while the bucket before it is written; the first of all is the embedding."""

    def pushed(*fields):
        words = ("checkpoint.load=x", "rl.advantage.critic.load=x", "mesh.pp=2", "mesh.tp=2", "mesh.ep=8", *fields)
        found = load_config(RlRunConfig, RECIPES / "qwen3_30b_a3b" / "ppo.toml", words)
        stages = [stage.phases for stage in memory_by_stage(training_of(found, 32))]
        return [phases.get("push", phases["rollout"]) - phases["rollout"] for phases in stages]

    # 768 wide experts, the router, 32 heads and 2 x 4 heads of 128 with their norms, two norms; 151,936 ids.
    dense, experts = 2048 * 128 * (32 + 8 + 32) + 2 * 128 + 2 * 2048 + 128 * 2048, 128 * 3 * 768 * 2048
    layer, share, vocabulary = dense + experts, dense + experts // 8, 151936 * 2048
    assert vocabulary > share
    served = "rl.engine.kind=vllm"
    assert pushed() == [0, 0]
    assert pushed(served, "rl.engine.transport_dir=/shared") == [2 * (share + vocabulary)] * 2
    # Ranks of other machines may not see this machine's memory.
    assert pushed(served) == [2 * 2 * layer, 2 * (share + vocabulary)]
    assert pushed(served, "rl.engine.transport=nccl") == [2 * layer, 0]
    assert pushed(served, "lora.rank=8", "rl.engine.lora=adapter", "rl.engine.base_model=x") == [0, 0]


def test_models_that_wait_take_room_in_their_own_phases_only():
    """Qwen3-30B-A3B on 32 ranks, tp 4 x ep 8, bf16: weights of the policy `p` and the critic `c` in numbers."""
    words = ("checkpoint.load=x", "rl.advantage.critic.load=x", "platform.logits_chunk_tokens=none")
    model = load_config(RlRunConfig, RECIPES / "qwen3_30b_a3b" / "ppo.toml", words)
    (p,), (c,) = (weights_by_stage(one, model.mesh) for one in (model.model, model.model.scored))

    def memory(*stores):
        found = load_config(RlRunConfig, RECIPES / "qwen3_30b_a3b" / "ppo.toml", (*words, *stores))
        return memory_of_fullest_rank(replace(training_of(found, 32), seq_length=20480))

    def state(*models):  # two moments and a master copy in fp32: 8 ranks share a dense weight's, 4 an expert's
        return sum(12 * one.dense for one in models) // 8 + sum(12 * one.expert for one in models) // 4

    def parts(found):
        phases = found.rollout_models, found.scoring_models, found.saving_models
        return (found.weights, found.gradients, found.optimizer, *phases, found.host)

    in_bf16, shift = 2 * (p.total + c.total), 4  # the critic's score.shift is one number in fp32
    gradients = 4 * (p.total + c.total)
    everything = in_bf16 + shift + gradients + state(p, c)
    assert parts(memory()) == (in_bf16 + shift, gradients, state(p, c), *[everything] * 3, 0)
    # The critic alone waits: its update has everything beside it.
    policy, critic = 6 * p.total + state(p), 2 * c.total + shift
    assert parts(memory("rl.advantage.critic.store=host")) == (
        *(in_bf16 + shift, gradients, state(p, c)),
        *(policy, policy + critic, policy + critic + state(c)),
        critic + state(c),
    )
    # Both wait. The policy's logits make its update the larger one: no critic, all of the policy.
    stored = memory("rl.advantage.critic.store=host", "rl.update.store=host")
    assert parts(stored) == (
        *(2 * p.total, 4 * p.total, state(p)),
        *(2 * p.total, in_bf16 + shift, in_bf16 + shift + state(p, c)),
        critic + state(p) + state(c),
    )
    # An update with its activations is the largest of the phases here; a rollout's cache is smaller than them.
    passes = stored.activations + stored.recomputed + stored.logits
    assert stored.total == stored.permanent + passes + stored.routes < memory().total / 1.9


def test_deferred_logits_take_a_chunk_and_the_gradient_of_their_weight():
    """16,384 positions of 151,936 ids on tp 2: 2^29 bytes of fp32 logits are 1,766 positions, 13 multiples of 128."""
    deferred = memory_of_fullest_rank(training("mesh.dp=8", length=16384))
    assert deferred.logits == 1664 * 75968 * (2 + 3 * 4) + 75968 * 2048 * (2 + 4)
    whole = memory_of_fullest_rank(training("mesh.dp=8", "platform.logits_chunk_tokens=none", length=16384))
    assert whole.logits == 16384 * 75968 * (2 + 4 + 4)


def test_the_message_names_the_stage_and_the_parts():
    memory = memory_of_fullest_rank(training())
    assert memory.describe().startswith(f"{memory.total / GIB:.1f} GiB on a rank of pipeline stage 0 (weights 8.2, ")


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_offloaded_state_of_the_optimizer_takes_main_memory_and_none_of_the_device(fraction):
    plain = memory_of_fullest_rank(training())
    moved = memory_of_fullest_rank(training(f"optim.offload_fraction={fraction}"))
    weights = plain.optimizer // 12
    assert moved.optimizer == pytest.approx(12 * weights * (1 - fraction), abs=1)
    assert moved.host_optimizer == moved.main_memory == pytest.approx(16 * weights * fraction, abs=16)
    assert plain.total - moved.total == plain.optimizer - moved.optimizer


ROUTED_WORDS = [
    "model.family=qwen3_moe",
    "model.num_layers=4",
    "model.moe.num_experts=128",
    "model.moe.top_k=8",
    "model.max_position=4096",
    "train.global_batch=64",
    "rl.rollout.prompts_per_step=16",
    "rl.rollout.group_size=8",
    "rl.rollout.max_new_tokens=1000",
    "rl.prompts.max_tokens=24",
]
TOKENS = 16 * 8 * 1024


def routed_training(*overrides, world=1):
    return training_of(load_config(RlRunConfig, None, [*ROUTED_WORDS, *overrides]), world)


@pytest.mark.parametrize(
    ("experts", "layers", "top_k", "capacity", "expected"),
    [
        (128, 48, 8, None, 384),  # Qwen3-30B-A3B
        (128, 94, 8, None, 752),  # Qwen3-235B-A22B
        (256, 58, 8, None, 464),  # DeepSeek-V3
        (384, 60, 8, None, 960),  # Kimi K2
        (512, 48, 10, None, 960),  # Qwen3-Next
        (16, 1, 4, 1.0, 4),
        (129, 1, 4, 1.0, 8),  # 258 codes: a dropped choice has a code of its own
    ],
)
def test_bytes_per_token(experts, layers, top_k, capacity, expected):
    """An int64 for each of 48 layers and 8 experts takes 3072 bytes; tests/unit/replay/test_cache.py fills a cache."""
    model = ModelConfig(moe=MoEConfig(num_experts=experts, top_k=top_k, capacity_factor=capacity))
    assert layers * layer_bytes(model) == expected


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["replay.kind=r2"], RouteBytes(device=TOKENS * 4 * 8)),
        (["replay.kind=none"], RouteBytes(device=TOKENS * 4 * 8)),
        (["replay.kind=r3"], RouteBytes(device=TOKENS * 4 * 8)),
        (["replay.kind=r2", "replay.observe_rollout=true"], RouteBytes(device=2 * TOKENS * 4 * 8)),
        (["replay.kind=r2", "replay.store=pinned"], RouteBytes(host=TOKENS * 4 * 8)),
        (["rl.update.old_logprobs=rollout"], RouteBytes()),
        (["rl.loss.kind=rspo"], RouteBytes(device=TOKENS * 4 * 8 * 7)),
    ],
)
def test_a_rank_s_routes_go_to_the_memory_of_the_config(words, wanted):
    assert routes_of_rank(routed_training(*words), 0) == wanted


def test_meshes_divide_the_routes_and_the_estimate_counts_them():
    whole = TOKENS * 4 * 8
    for mesh, world in ((["mesh.pp=2"], 2), (["mesh.tp=2", "mesh.ep=2"], 2), (["mesh.cp=2"], 2), (["mesh.dp=2"], 2)):
        assert routes_of_rank(routed_training("replay.kind=r2", *mesh, world=world), 0).device == whole // 2
    pinned, stored = (
        memory_by_stage(routed_training("replay.kind=r2", f"replay.store={store}"))[0] for store in ("pinned", "device")
    )
    assert stored.total - pinned.total == stored.routes == pinned.host_routes == whole
    assert pinned.routes == stored.host_routes == 0
    assert "routes 0.0" in stored.describe() and "routes" not in pinned.describe()


USAGE = namedtuple("USAGE", "total used free")
SMALL = (
    "model.family=llama",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_hidden_size=128",
    "model.vocab_size=512",
)
# Query, key, value and output of attention, the MLP's three matrices, two norms; embedding, output layer, last norm.
WEIGHTS = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 512 * 64 + 64


def disk(*overrides, cls=PretrainConfig):
    return disk_of(training_of(load_config(cls, None, [*SMALL, *overrides]), 1))


@pytest.mark.parametrize(("precision", "bytes_per_weight"), [("bf16", 14), ("fp32", 16)])
def test_a_checkpoint_has_weights_and_three_fp32_numbers_for_each(precision, bytes_per_weight):
    found = disk(f"platform.precision={precision}")
    assert found.checkpoint == WEIGHTS * bytes_per_weight


def test_a_checkpoint_of_adapters_alone_has_no_other_weights():
    adapters = 2 * 8 * ((3 * 64 + 64 + 2 * 32 + 64 + 64) + (2 * 64 + 2 * 128 + 128 + 64))
    lora = ("platform.precision=fp32", "lora.rank=8", "checkpoint.load=base")
    assert disk(*lora).checkpoint == 4 * WEIGHTS + 16 * adapters
    assert disk(*lora, "checkpoint.weights=adapters").checkpoint == 16 * adapters


@pytest.mark.parametrize(
    ("keep", "interval", "number"), [("2", "10", 3), ("all", "30", 4), ("5", "60", 2), ("2", "none", 1)]
)
def test_the_kept_checkpoints_are_counted_and_the_one_that_is_written(keep, interval, number):
    words = ("train.steps=100", f"checkpoint.keep={keep}", f"checkpoint.interval={interval}")
    assert disk(*words).num_checkpoints == number


def test_a_critic_is_saved_beside_the_policy():
    fp32 = "platform.precision=fp32"
    plain = disk(fp32, cls=RlRunConfig).checkpoint
    critic = disk(fp32, "rl.advantage.kind=gae", cls=RlRunConfig).checkpoint
    # One row of weights in the place of the output layer's 512, and the shift of the scores, 4 bytes.
    assert critic - plain in ((WEIGHTS - 511 * 64) * 16, (WEIGHTS - 511 * 64) * 16 + 4)


def test_samples_of_rl_are_counted():
    words = [
        "model.family=qwen3_moe",
        "model.moe.num_experts=8",
        "model.moe.top_k=2",
        "train.steps=80",
        "train.global_batch=16",
        "rl.rollout.prompts_per_step=4",
        "rl.rollout.group_size=8",
        "rl.rollout.max_new_tokens=100",
        "rl.prompts.max_tokens=28",
        "rl.samples.interval=10",
    ]
    # 80 steps, two for each of 40 rollouts of 32 completions; every tenth is written, with 5 bytes a token.
    assert disk(*words, cls=RlRunConfig).samples == 4 * 32 * 128 * 5


def test_too_little_room_is_a_warning_and_what_is_there_already_counts(tmp_path, monkeypatch):
    run_dir, planned = tmp_path / "runs/a", disk("train.steps=100", "checkpoint.interval=10")
    total = planned.total
    monkeypatch.setattr("shutil.disk_usage", lambda path: USAGE(total, 1000, total - 1000))
    warning = disk_warning(run_dir, planned)
    assert f"{tmp_path} has" in warning and "3 checkpoints of" in warning and "lower checkpoint.keep" in warning
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints/0.distcp").write_bytes(bytes(1000))
    assert disk_warning(run_dir, planned) == ""


GRPO = Path(__file__).parents[3] / "launch/recipes/qwen3_30b_a3b/grpo_r2.toml"


def test_the_estimate_stands_beside_the_memory_of_the_device_and_warns_above_it():
    config = load_config(RlRunConfig, GRPO)
    (line,) = device_memory_lines(training_of(config, 16), 80 * GIB)
    assert line.startswith("memory, estimated: 60.0 GiB on a rank of pipeline stage 0 (weights 7.5, gradients 15.0")
    assert line.endswith(" of 80.0")
    _, warning = device_memory_lines(training_of(config, 8), 80 * GIB)
    assert warning.startswith("warning: the estimate is 2.3 GiB more") and "mcore-rl plan" in warning


def test_a_start_logs_it_where_the_memory_of_the_device_is_known(monkeypatch):
    platform = Platform(
        device=torch.device("cpu"), dtype=torch.bfloat16, layers="torch", rank=0, local_rank=0, world_size=16,
        deterministic=False,
    )  # fmt: skip
    config = load_config(RlRunConfig, GRPO)
    assert open_run._memory_lines(config, platform) == []
    monkeypatch.setattr(Platform, "device_bytes", 140 * GIB)
    assert open_run._memory_lines(config, platform)[0].endswith(" of 140.0")


SHARED = RECIPES / "qwen3_30b_a3b/grpo_r3_shared.toml"


def shared(*overrides, world=16, path=SHARED):
    return memory_of_fullest_rank(training_of(load_config(RlRunConfig, path, overrides), world))


def test_servers_on_the_ranks_gpus_have_two_phases_of_their_own_and_keep_a_rest_in_all_others():
    """Qwen3-30B-A3B in bf16, 48 layers of 4 heads of 128 numbers for keys and values, on 4 GPUs a server."""
    memory, alone = shared(), shared("rl.engine.share_gpus=false", "rl.engine.urls=['http://a:1']")
    server = memory.server
    assert alone.server is None and "generate" not in alone.phases
    assert server.weights == pytest.approx(30.53e9 * 2 / 4, rel=0.002)
    assert server.token == 48 * 2 * 1 * 128 * 2 and server.sample == 10240 * server.token
    # A layer: 128 experts of 3 x 2048 x 768, attention and router.
    layer = 128 * 3 * 2048 * 768 + 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2048 * 128
    assert server.bucket == pytest.approx(2 * layer, rel=1e-4)
    # The trainer gathers a layer with its own experts, or the first and last bucket, of the vocabulary, beside one.
    experts = 2 * 128 * 3 * 2048 * 768
    share, vocabulary = 2 * layer - experts + experts // 8, 2 * 151936 * 2048
    pushed = share + max(share, vocabulary)
    assert memory.pushed == pytest.approx(pushed, rel=1e-4)
    policy = memory.rollout_models
    assert memory.phases == {
        "scoring": alone.phases["scoring"] + 4 * GIB,
        "update": alone.phases["update"] + 4 * GIB,
        "checkpoint": alone.phases["checkpoint"] + 4 * GIB,
        "push": policy + memory.pushed + server.weights + 2 * server.bucket + 4 * GIB,
        "generate": policy + server.weights + server.sample + 6 * GIB,
    }
    # By slots every rank has room for the largest bucket, and rank 0 what it gathers too.
    plan = training_of(load_config(RlRunConfig, SHARED, ["rl.engine.transport=ipc", "mesh.pp=2"]), 32)
    assert [stage.pushed for stage in memory_by_stage(plan)] == pytest.approx([2 * 2 * layer, 2 * layer], rel=1e-4)


def test_servers_with_weights_in_fp8_blocks_have_a_byte_for_each_and_so_has_what_is_written():
    memory, plain = shared("rl.engine.weights=fp8_block"), shared()
    # A byte less of two for all matrices of the layers but routers.
    matrices = 48 * (128 * 3 * 2048 * 768 + 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128)
    assert plain.server.weights - memory.server.weights == pytest.approx(matrices / 4, rel=1e-4)
    assert memory.server.bucket == plain.server.bucket, "a layer is gathered as it was trained"
    share = 2 * (16 * 3 * 2048 * 768 + 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2048 * 128)
    assert plain.pushed - memory.pushed == pytest.approx(share / 2, rel=1e-4)


def test_servers_of_adapters_keep_their_base_in_main_memory_and_parts_of_a_server_are_on_each_of_its_gpus():
    adapters = ("rl.engine.lora=adapter", "lora.rank=16", "rl.engine.base_model=base")
    merged, kept = shared("lora.rank=16"), shared(*adapters)
    assert kept.host - merged.host == kept.server.weights
    # The weights last sent: once over all ranks, and once for each worker of a server, of which each GPU has one.
    sent = shared("rl.engine.delta=true").host_sent
    assert merged.host_sent == 0 and sent == pytest.approx(30.53e9 * 2 * (1 / 16 + 1), rel=0.01)
    one = shared("rl.engine.tensor_parallel=8")
    assert one.server.weights == merged.server.weights // 2
    assert one.server.token == merged.server.token  # the four heads are there twice
