"""A reinforcement-learning run as a whole: what is refused, with the remedy."""

from pathlib import Path

import pytest

from mcore_rl.checks.inputs import absent_inputs, inputs_of
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "launch/recipes/tiny_moe/grpo.toml"


def config(*overrides: str) -> RlRunConfig:
    return load_config(RlRunConfig, RECIPE, overrides)


def test_the_recipe_has_two_updates_a_rollout_in_rows_that_its_mesh_can_cut() -> None:
    tiny = config()
    check_rl(tiny, 2)
    check_rl(config("model.moe.capacity_factor=1.5", "replay.kind=r2"), 2)
    check_rl(config("rl.freeze_router=true", "model.moe.aux_loss_coeff=0"), 2)
    check_rl(config("rl.freeze_router=true", "model.moe.balance=none"), 2)
    check_rl(config("model.moe.dispatcher=allgather"), 2)
    assert (tiny.rollout_size, tiny.updates_per_rollout) == (128, 2)
    assert config("rl.update.epochs=3").updates_per_rollout == 6
    cut = config("mesh.cp=2", "rl.prompts.max_tokens=15", "rl.update.max_tokens_per_microbatch=auto")
    assert (cut.longest_sample, cut.packed_multiple, cut.packed_length) == (32, 4, 32)
    in_8_bits = cut.platform.model_copy(update={"fp8": "hybrid", "fp8_recipe": "mxfp8"})
    assert cut.model_copy(update={"platform": in_8_bits}).packed_multiple == 32 * cut.mesh.tp * cut.mesh.cp


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.global_batch=48"], "does not divide the 128 completions .* Use (32|64)"),
        (
            ["rl.loss.kl_coeff=0.2", "rl.loss.kl_target=6", "rl.loss.kl_horizon=127"],
            "is shorter than the 128 completions .* Set it to 128",
        ),
        (["train.steps=7"], "train.steps=7 is not a multiple of the 2 .* Use 8"),
        (["checkpoint.interval=3"], "checkpoint.interval=3 is not a multiple"),
        (["train.micro_batch=2"], "packed into forward passes of rl.update.max_tokens_per_microbatch"),
        (["rl.update.max_tokens_per_microbatch=16"], "Raise it to 32 or more"),
        (["rl.prompts.max_tokens=2000"], "more than model.max_position=1024"),
        (["model.attention_dropout=0.1"], "model.attention_dropout=0.1: the policy in training"),
        (["platform.layers=te"], 'Set platform.layers="torch"'),
        (["model.moe.capacity_factor=1.5"], 'or replay.kind="r2" with .* imposes what that pass dropped'),
        (["model.moe.capacity_factor=1.5", "replay.kind=r3"], "drops no token"),
        (
            ["model.moe.capacity_factor=1.5", "replay.kind=r2", "rl.update.old_logprobs=rollout"],
            'Set old_logprobs="trainer"',
        ),
        (["rl.eval.samples=4"], "are all the same"),
        (["rl.eval.temperature=1e-300"], "is below 1e-06"),
        (
            ["rl.advantage.kind=gae", "rl.advantage.critic.warmup_rollouts=60"],
            "rl.advantage.critic.warmup_rollouts=60 are all of",
        ),
        (
            ["rl.advantage.kind=gae", "rl.advantage.critic.optim.min_lr=1"],
            "rl.advantage.critic.optim.min_lr=1.0 is above rl.advantage.critic.optim.lr=0.0003",
        ),
        (
            ["optim.offload_fraction=0.5", "platform.precision=bf16", "rl.update.store=host"],
            'rl.update.store="host" with optim.offload_fraction=0.5',
        ),
        (
            ["mesh.overlap_tp=true", "mesh.tp=2", "platform.precision=bf16"],
            "those of this program do not. Set it to false.",
        ),
        (
            ["rl.advantage.kind=gae", "rl.advantage.critic.optim.main_grads_dtype=bf16"],
            'rl.advantage.critic.optim.main_grads_dtype="bf16" with platform.precision="fp32"',
        ),
        (["rl.eval.files=['x']"], "whose held-out problems are made"),
        (
            ["rl.ptx.coeff=0.1", "rl.ptx.files=['x']", "rl.ptx.sequences=3", "mesh.tp=1", "mesh.ep=1"],
            "rl.ptx.sequences=3 is not a multiple of 2, for 2 data-parallel ranks. Use 4",
        ),
        (
            [
                *("rl.advantage.kind=gae", "rl.advantage.critic.replay=r2", "model.family=qwen3"),
                *("model.moe.num_experts=0", "mesh.ep=1"),
            ],
            'rl.advantage.critic.replay="r2", but the model has no experts',
        ),
        (["replay.kind=r2", "rl.update.old_logprobs=rollout"], 'or replay.kind="r3"'),
        (["data.chat_template=tokenizer"], 'Set it to "plain" or "raw"'),
        (["train.ramp_start=2"], "does not grow"),
        (
            ["model.moe.dispatcher=allgather", "mesh.tp=1", "mesh.ep=2"],
            "ep=2 over more than the mesh.tp=1 x mesh.cp=1 ranks .* different lengths",
        ),
        (
            [
                *("model.family=deepseek_v3", "model.mtp_layers=1", "mesh.tp=1", "mesh.ep=1", "mesh.pp=2"),
                "mesh.overlap_grad_reduce=true",
            ],
            "overlap_grad_reduce=true with mesh.pp=2 and model.mtp_layers=1, .*mtp_layers=0",
        ),
        (
            ["rl.freeze_router=true", "model.moe.aux_loss_coeff=0.01", "model.moe.z_loss_coeff=0.001"],
            "freeze_router=true with model.moe.aux_loss_coeff=0.01, model.moe.z_loss_coeff=0.001: .* Set it to 0",
        ),
        (
            ["rl.freeze_router=true", "model.moe.balance=none", "model.moe.z_loss_coeff=0.001"],
            "freeze_router=true with model.moe.z_loss_coeff=0.001: ",
        ),
        (
            ["rl.freeze_router=true", "model.family=qwen3", "model.moe.num_experts=0", "mesh.ep=1"],
            "freeze_router=true, but the model has no experts",
        ),
    ],
)
def test_what_is_not_what_its_name_says_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rl(config(*overrides), 2)


def test_teachers_and_texts_that_are_not_there_are_named_with_the_other_files() -> None:
    gone = config(
        "lora.load=gone/adapters",
        "rl.engine.kind=vllm",
        "rl.engine.base_model=gone/base",
        "rl.engine.ca_file=gone/engine.pem",
        'rl.reward.model_tokenizer={kind="huggingface", path="gone/tokenizer"}',
        "rl.reward.model_chat_template=gone/chat.jinja",
        "rl.reward.server.ca_file=gone/reward.pem",
        "rl.distill.teacher=gone/teacher",
        'rl.distill.teachers={mathematics="gone/other", own="self"}',
        'rl.ptx.files=["gone/chat.jsonl"]',
        'rl.ptx.tokens=["gone/books"]',
    )
    fields = [
        (name, str(path))
        for name, path, _ in inputs_of(gone)
        if name.startswith(("lora", "rl.distill", "rl.ptx", "rl.engine", "rl.reward"))
    ]
    assert fields == [
        ("lora.load", "gone/adapters"),
        ("rl.reward.model_tokenizer.path", "gone/tokenizer"),
        ("rl.reward.model_chat_template", "gone/chat.jinja"),
        ("rl.reward.server.ca_file", "gone/reward.pem"),
        ("rl.distill.teacher", "gone/teacher"),
        ("rl.distill.teachers.mathematics", "gone/other"),
        ("rl.ptx.files", "gone/chat.jsonl"),
        ("rl.ptx.tokens", "gone/books.bin"),
        ("rl.ptx.tokens", "gone/books.idx"),
        ("rl.engine.base_model", "gone/base"),
        ("rl.engine.ca_file", "gone/engine.pem"),
    ]
    sentences = "\n".join(absent_inputs(inputs_of(gone)))
    assert all(f"{name} names" in sentences and path in sentences for name, path in fields)
