"""Low-rank adapters by name on a real vLLM server, which the package's own command starts with their base."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.families import hf_config
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import local_shards
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.server_api import ServerApi, ServerError, server_apis
from mcore_rl.rl.engines.server_process import ServerProcess, server_command
from mcore_rl.rl.engines.weight_push import AdapterPush, ServedAdapters
from tests.servers.conftest import Figures
from tests.servers.vllm_server import FORKED, SHAPE, Trainer, random_prompts, until_healthy

MODEL = ModelConfig(family="qwen3", **SHAPE)
"""Dense: vLLM computes the adapters of a mixture of experts, even of its attention alone, with Triton, on GPUs."""
SIZES = (0.0, 0.05, 0.1)
"""Standard deviations of B: new adapters, which add nothing, and those of two updates."""


@pytest.fixture
def config(python: str, tmp_path: Path) -> RlRunConfig:
    return RlRunConfig.model_validate(
        {
            "model": MODEL,
            "lora": {"rank": 8, "alpha": 16.0},
            "rl": {
                "engine": {
                    "kind": "vllm",
                    "lora": "adapter",
                    "base_model": str(tmp_path / "base"),
                    "command": (python, str(FORKED)),
                    "count": 1,
                    "dtype": "fp32",
                    "max_model_len": 512,
                    "transport_dir": str(tmp_path),
                }
            },
        }
    )


@pytest.fixture
def trainer(config: RlRunConfig, mesh: Mesh, tmp_path: Path) -> Trainer:
    """The policy with new adapters, over a base of which the Hugging Face folder is written."""
    trainer = Trainer(config.model, mesh)
    trainer.randomize(seed=1)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(hf_config(config.model) | {"torch_dtype": "float32"}))
    save_file(trainer.tensors(), base / "model.safetensors", metadata={"format": "pt"})
    add_adapters(trainer.chunks, config.lora, config.model, seed=1)
    return trainer


@pytest.fixture
def api(config: RlRunConfig, trainer: Trainer, tmp_path: Path) -> Iterator[ServerApi]:
    process = ServerProcess(
        lambda port: server_command(config, tmp_path / "servers", port, on_gpu=False), tmp_path / "server.log"
    )
    try:
        api = server_apis(config.rl.engine, config.model)(process.url)
        until_healthy(api, lambda: process.is_alive, process.log)
        yield api
    finally:
        process.close()


def test_a_server_samples_with_the_adapters_of_each_update_by_name(
    config: RlRunConfig, trainer: Trainer, api: ServerApi, mesh: Mesh, tmp_path: Path, figures: Figures
) -> None:
    served, engine = ServedAdapters(tmp_path), config.served
    assert engine is not None
    push = AdapterPush(
        [api], trainer.chunks, mesh, config.model, engine, Sampling(max_new_tokens=1), lora=config.lora, served=served
    )
    prompts = random_prompts(8, 24, config.model.vocab_size)
    sampling, names, found = Sampling(max_new_tokens=48), list[str](), list[dict[str, float]]()
    for version, size in enumerate(SIZES):
        for number, shard in enumerate(local_shards(trainer.chunks)):
            if shard.key.endswith("adapter.B"):
                generator = torch.Generator().manual_seed(100 * version + number)
                shard.data.detach().copy_(size * torch.randn(shard.data.shape, generator=generator))
        report = push.push(version)
        assert report.living == (api.url,), report.failed
        assert report.adapter is not None and report.adapter not in names
        names.append(report.adapter)
        made = [
            api.generate(prompt, sampling, 7, salt=names[-1], request_id=f"{version}-{i}", adapter=names[-1])
            for i, prompt in enumerate(prompts)
        ]
        compared = trainer.compared(zip(prompts, made, strict=True), 1.0)
        moved = max(
            abs(one - other)
            for prompt in prompts
            for one, other in zip(
                api.prompt_logprobs(prompt, adapter=names[-1]), api.prompt_logprobs(prompt), strict=True
            )
        )
        found.append({"probe": report.probe, "apart from the base": moved, **asdict(compared)})
        assert compared.largest <= 2e-5 and compared.compared_fraction > 0.5, found
        assert (moved > 0.05) == (size > 0), found
    with pytest.raises(ServerError):
        api.prompt_logprobs(prompts[0], adapter=names[-2])
    figures["adapters by name, a dense model"] = found
