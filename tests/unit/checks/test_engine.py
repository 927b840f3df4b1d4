"""The section `rl.engine`: what is refused of servers, with the remedy."""

import pytest

from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from tests.unit.checks.test_rl_run import config

KIND = ("model.family=qwen3_moe", "rl.engine.kind=vllm")
SERVED = (*KIND, "rl.engine.count=2")
WHOLE = ("mesh.tp=1", "mesh.ep=1")
ADAPTERS = ("rl.engine.lora=adapter", "lora.rank=16", "model.moe.balance=none", "platform.layers=torch")
AT_URLS = (*KIND, "rl.engine.urls=['http://n1:80','http://n2:80']")


def served(*overrides: str, base: tuple[str, ...] = SERVED) -> RlRunConfig:
    return config(*base, *overrides)


def test_servers_that_are_started_or_there_already_pass_and_training_takes_any_layers() -> None:
    check_rl(served(), 2)
    check_rl(served("rl.engine.kind=sglang", "rl.engine.devices=[4,5]"), 2)
    check_rl(served("rl.engine.slots=128"), 2)
    check_rl(served("rl.rollout.temperature=0.7"), 2)
    check_rl(served("rl.rollout.top_p=0.9"), 2)
    check_rl(served("replay.kind=r3", base=AT_URLS), 2)
    check_rl(served(*ADAPTERS, "rl.engine.base_model=base"), 2)
    check_rl(served(*ADAPTERS, base=AT_URLS), 2)
    assert served().allows_te and not config().allows_te
    check_rl(served("platform.layers=te", "platform.device=cuda"), 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rl.engine.count=0"], r"are either started by the run or there already"),
        (["rl.engine.urls=['http://n1:80']"], r"are either started by the run or there already"),
        (["rl.engine.min_servers=3"], r"rl\.engine\.min_servers=3 of 2 servers"),
        (["rl.engine.count=0", "rl.engine.urls=['n1:80']"], r'"n1:80", wanted an address as http://node7:8000'),
        (["rl.engine.count=0", "rl.engine.urls=['http://n1']"], r'"http://n1", wanted an address'),
        (["rl.engine.count=0", "rl.engine.urls=['http://n1:1','http://n1:1']"], r"names a server twice"),
        (["rl.engine.api_key_env=KEY"], r"ask for no key"),
        (["rl.engine.ca_file=x"], r"no server of rl\.engine\.urls is https"),
        (["rl.engine.args=['--max-num-seqs=3']"], r"rl\.engine\.args names --max-num-seqs=3, which the run sets"),
        (["rl.engine.base_model=base"], r'rl\.engine\.lora="merged": servers get all weights'),
        (["rl.engine.lora=adapter"], r"the policy has no adapters"),
        ([*ADAPTERS], r"no rl\.engine\.base_model: the servers have to load the base by themselves"),
        (
            [*ADAPTERS, "rl.engine.count=0", "rl.engine.urls=['http://a:1']", "rl.engine.base_model=base"],
            r"those servers were started with a model",
        ),
        ([*ADAPTERS, "rl.engine.base_model=base", "rl.engine.transport=nccl"], r"adapters come as files"),
        (
            [*ADAPTERS, "rl.engine.base_model=base", "rl.rollout.max_staleness=1"],
            r"would need adapters that are unloaded then",
        ),
        (
            [*ADAPTERS, "rl.engine.base_model=base", "lora.rank=600"],
            r"adapters of rank 600: vLLM takes ranks up to 512",
        ),
        (["rl.engine.args=['--port=3']"], r"rl\.engine\.args names --port=3, which the run sets"),
        (["rl.engine.devices=[1]"], r"2 servers of tensor_parallel=1 take 2 different GPUs"),
        (["rl.engine.devices=[1,2]", "platform.device=cpu"], r'with platform\.device="cpu"'),
        (["rl.engine.transport=nccl", "rl.engine.transport_dir=x"], r'not used by transport="nccl"'),
        (["rl.rollout.temperature=0.7", "rl.rollout.top_p=0.9"], r"before the temperature, or after the cut"),
        (["rl.rollout.top_k=5", "rl.eval.temperature=0.7"], r"Set rl\.eval\.temperature to 0 or 1"),
        (
            ["model.family=minimax_m2"],
            r"have not been proved on a server yet; they have of dots1, glm4_moe, .*, qwen3_moe, seed_oss, ",
        ),
        (["rl.engine.max_model_len=20"], r"rl\.engine\.max_model_len=20; wanted at least 32, .*without a word"),
        (["replay.kind=r3", "platform.device=cpu"], r"vLLM records no routes on CPUs"),
    ],
)
def test_what_servers_cannot_do_is_refused_with_the_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rl(served(*overrides), 2)


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        (["platform.device=cpu"], 1, r'cuda_graphs=true with platform\.device="cpu": CUDA graphs are a GPU'),
        (["mesh.ep=2"], 2, r"cuda_graphs=true with mesh\.ep=2: ranks exchange tokens in each step"),
        (["model.moe.capacity_factor=1.5"], 1, r"with model\.moe\.capacity_factor=1\.5: the host then reads"),
    ],
)
def test_cuda_graphs_are_refused_where_a_step_cannot_be_captured(
    overrides: list[str], num_ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rl(config(*WHOLE, "rl.engine.cuda_graphs=true", *overrides), num_ranks)
    check_rl(config(*WHOLE, "rl.engine.cuda_graphs=true"), 1)
    check_rl(config(*WHOLE, "rl.engine.cuda_graphs=false", "mesh.ep=2"), 2)
