"""The closed form of a rank's weights and gradients against Megatron's own modules and buffers of that rank."""

import pytest
import torch

from mcore_rl.backend.platform import Platform
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.model.build import build_model
from mcore_rl.plan.memory import BUFFER_BYTES, memory_by_stage
from mcore_rl.plan.weights import weights_by_stage
from mcore_rl.train.setup import wrap_for_data_parallelism
from tests.fake_worlds import fake_rank
from tests.ranks import run_ranks
from tests.tiny_models import TINY

CASES = [
    *((family, "bf16", {"tp": 2, "ep": 2, "pp": 4}, 8, 0) for family in ("qwen3_moe", "deepseek_v3", "qwen2_moe")),
    ("gpt_oss", "fp32", {"pp": 2, "ep": 2, "tp": 2}, 4, 0),
    ("deepseek_v3", "bf16", {"pp": 2, "vpp": 2, "ep": 4, "etp": 2, "tp": 2}, 16, 0),
    ("deepseek_v3", "bf16", {"pp": 4, "tp": 1}, 4, 1),
    ("qwen3_moe", "bf16", {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 3}, 2, 0),
    ("deepseek_v3", "bf16", {"pp": 2, "vpp": 2, "pp_layout": "balanced"}, 2, 1),
    ("qwen3_moe", "bf16", {"pp": 2, "vpp": 2, "pp_layout": (2, 1, 1, 0)}, 2, 0),
    ("llama", "fp32", {"pp": 4, "tp": 2}, 8, 0),
    ("qwen3_moe-score", "bf16", {"tp": 2, "pp": 2, "ep": 2}, 4, 0),
    ("gpt_oss-score", "bf16", {"pp": 2}, 2, 0),
    ("olmoe", "bf16", {"tp": 2, "cp": 2, "ep": 4}, 4, 0),
]  # fmt: skip


def config_of(family, precision, mesh, mtp_layers):
    family, _, head = family.partition("-")
    model = TINY[family].model_copy(update={"mtp_layers": mtp_layers} if mtp_layers else {})
    if family == "gpt_oss":
        model = model.model_copy(update={"tied_embeddings": True})
    if head:
        model = model.model_copy(update={"head": head})
    config = load_config(PretrainConfig, None, [f"platform.precision={precision}", "mesh.dp=auto"])
    return config.model_copy(
        update={"model": model, "mesh": config.mesh.model_copy(update=mesh)}
    )  # fmt: skip


def bytes_of_stages(cases):
    """Bytes of weights, and of gradients without the gaps between them, on a rank of each stage."""
    found = []
    for family, precision, mesh, world, mtp_layers in cases:
        config = config_of(family, precision, mesh, mtp_layers)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        stages = []
        for stage in range(config.mesh.pp):
            # The last rank of the stage, whose experts and heads are the last ones.
            rank = (stage + 1) * world // config.mesh.pp - 1
            with fake_rank(config.mesh, rank, world) as fake:
                platform = Platform(
                    device=torch.device("cpu"), dtype=dtype, layers="torch", rank=rank, local_rank=0,
                    world_size=world, deterministic=False,
                )  # fmt: skip
                chunks = build_model(config.model, fake, platform, config.platform)
                params = [param for chunk in chunks for param in chunk.parameters()]
                wrapped = wrap_for_data_parallelism(chunks, config.mesh, fake)
                gradients = [b for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
                stages.append(
                    (
                        sum(param.numel() * param.element_size() for param in params),
                        sum(p.numel() * b.grad_data.element_size() for b in gradients for p in b.params),
                    )
                )
        found.append(stages)
    return found


@pytest.fixture(scope="module")
def built():
    return run_ranks(bytes_of_stages, 1, CASES)[0]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: "-".join(map(str, CASES[index][:3])))
def test_every_stage_has_the_bytes_that_megatron_builds(built, index):
    family, precision, mesh, world, mtp_layers = CASES[index]
    config = config_of(family, precision, mesh, mtp_layers)
    stages = zip(memory_by_stage(config, world, 64), weights_by_stage(config.model, config.mesh), strict=True)
    planned = [(stage.weights - weights.buffers * BUFFER_BYTES, stage.gradients) for stage, weights in stages]
    assert planned == built[index]
