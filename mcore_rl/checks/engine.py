"""Checks of the section `rl.engine`: that the run can use the servers, and gets the logprobs that it needs."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from mcore_rl.checks.model import unused
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.rl.rollout import VLLM_RANKS, NativeConfig, ServedConfig, VllmConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.families.weight_map import FP8_BLOCK

PROBED_FAMILIES = (
    *("dots1", "glm4_moe", "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "solar_open"),
)
"""Families with which a real server was proved: it had the weights after an update, and the probe found each kind of
tensor that was left old."""
OWN_ARGUMENTS = frozenset(
    {
        *("--model", "--model-path", "--served-model-name", "--load-format", "--host", "--port", "--dtype"),
        *("--skip-tokenizer-init", "--enable-scale-out", "--max-model-len", "--context-length", "--logprobs-mode"),
        *("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--worker-extension-cls"),
        *("--weight-transfer-config", "--enable-return-routed-experts", "--device", "--api-key"),
        *("--max-num-seqs", "--max-running-requests", "--enable-lora", "--max-lora-rank"),
    }
)
"""Arguments that are derived from the config's fields."""
SHARED_ARGUMENTS = frozenset(
    {
        *("--enable-sleep-mode", "--kv-cache-memory-bytes", "--gpu-memory-utilization"),
        *("--enable-memory-saver", "--mem-fraction-static", "--enable-weights-cpu-backup"),
    }
)
"""Arguments that are derived from the memory that the trainer leaves, with rl.engine.share_gpus."""


def engine_violations(config: RlRunConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence for each reason why `config` cannot generate completions on `world_size` ranks."""
    engine = config.rl.engine
    if isinstance(engine, NativeConfig) and engine.cuda_graphs is True:
        yield from _graphs(config.mesh, config.model, config.platform)
    if isinstance(engine, ServedConfig):
        yield from _servers(engine)
        yield from _shared(engine, config, world_size) if engine.share_gpus else _places(engine, config.platform.device)
        yield from _completions(engine, config)
        yield from _adapters(engine, config.lora, config.model, config.rl.rollout.max_staleness)
        yield from _fp8_blocks(engine, config) if engine.in_fp8 else ()


def _graphs(mesh: MeshConfig, model: ModelConfig, platform: PlatformConfig) -> Iterator[str]:
    """Check that a step can be captured: one rank computes it, and no host reads numbers within it."""
    wanted = "rl.engine.cuda_graphs=true"
    if platform.device == "cpu":
        yield f'{wanted} with platform.device="cpu": CUDA graphs are a GPU\'s. Set it to "auto".'
    if split := [name for name in ("tp", "pp", "ep", "etp") if (getattr(mesh, name) or 1) > 1]:
        sizes = ", ".join(f"mesh.{name}={getattr(mesh, name)}" for name in split)
        yield (
            f"{wanted} with {sizes}: ranks exchange tokens in each step, and a graph cannot wait for their number. Set "
            'it to "auto", or these to 1.'
        )
    if model.moe.capacity_factor is not None:
        yield (
            f"{wanted} with model.moe.capacity_factor={model.moe.capacity_factor}: the host then reads how many "
            'tokens each expert gets. Set it to "auto", or capacity_factor=none.'
        )


def _shared(engine: ServedConfig, config: RlRunConfig, world_size: int) -> Iterator[str]:
    """Check that servers and trainer can take turns on the GPUs of the ranks."""
    wanted, size, rl = "rl.engine.share_gpus=true", engine.tensor_parallel, config.rl
    yield from unused(
        "rl.engine",
        engine,
        (
            True,
            "count urls servers_dir devices api_key_env ca_file",
            f"{wanted}: the run starts servers on the GPUs of its ranks",
        ),
    )
    if world_size % size:
        yield (
            f"rl.engine.tensor_parallel={size} with {wanted} on {world_size} ranks: each server takes the GPUs of "
            f"{size} of them. Set it to a divisor."
        )
    elif engine.min_servers > world_size // size:
        yield f"rl.engine.min_servers={engine.min_servers} of {world_size // size} servers. Lower it."
    if rl.rollout.max_staleness:
        yield (
            f"{wanted} with rl.rollout.max_staleness={rl.rollout.max_staleness}: the servers sleep while the policy "
            "trains. Set max_staleness=0, or give servers GPUs of their own."
        )
    stores = {"rl.update.store": rl.update.store}
    if config.critic is not None:
        stores["rl.advantage.critic.store"] = config.critic.store
    for name, store in stores.items():
        if store == "device":
            yield (
                f'{wanted} with {name}="device": the optimizer state would stay where the servers need the memory. Set '
                'it to "host".'
            )
    if rl.reward.model_parts:
        yield (
            f"{wanted} with rl.reward.parts={toml_value(list(rl.reward.model_parts))}: a reward model scores while the "
            "servers have the memory of the GPUs. Name a reward server (http:URL), or give servers GPUs of their own."
        )


def _places(engine: ServedConfig, device: str) -> Iterator[str]:
    """Check where the servers are that have GPUs of their own."""
    total = engine.count or len(engine.urls)
    if bool(engine.count) == bool(engine.urls or engine.servers_dir):
        yield (
            f"rl.engine.count={engine.count} with rl.engine.urls={toml_value(list(engine.urls))}: the servers of "
            f'rl.engine.kind="{engine.kind}" are either started by the run or there already. Set one of the two.'
        )
    elif engine.min_servers > total and engine.servers_dir is None:
        yield f"rl.engine.min_servers={engine.min_servers} of {total} servers. Lower it."
    for url in engine.urls:
        try:
            parts = urlsplit(url)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
        except ValueError:
            is_right = False
        if not is_right:
            yield f'rl.engine.urls names "{url}", wanted an address as http://node7:8000. Correct it.'
    if len(set(engine.urls)) < len(engine.urls):
        yield f"rl.engine.urls={toml_value(list(engine.urls))} names a server twice. Take one out."
    cause = f"rl.engine.count={engine.count}: servers that are started are reached on their own machine, without a key"
    has_https = any(url.startswith("https://") for url in engine.urls)
    yield from unused(
        "rl.engine",
        engine,
        (bool(engine.count), "api_key_env", cause),
        (not has_https, "ca_file", "rl.engine.urls, none of which is https"),
        (device == "cpu", "devices", 'platform.device="cpu"'),
    )
    wanted = engine.count * engine.tensor_parallel
    if engine.devices and (len(engine.devices) != wanted or len(set(engine.devices)) != wanted):
        yield (
            f"rl.engine.devices={list(engine.devices)}: rl.engine.count={engine.count} servers of tensor_parallel="
            f"{engine.tensor_parallel} take {wanted} different GPUs. Name as many."
        )


def _servers(engine: ServedConfig) -> Iterator[str]:
    wrong_ways = {
        ("nccl", True): "NCCL has no group with two processes on one GPU",
        ("ipc", False): "only servers on the GPUs of the ranks can read their memory",
    }
    if reason := wrong_ways.get((engine.way, engine.share_gpus)):
        shared = toml_value(engine.share_gpus)
        yield f'rl.engine.transport="{engine.way}" with rl.engine.share_gpus={shared}: {reason}. Set transport="files".'
    at_urls = "rl.engine.urls, whose servers were started with a model"
    by = f'rl.engine.transport="{engine.way}"'
    yield from unused(
        "rl.engine",
        engine,
        (engine.way != "files", "transport_dir", by),
        (engine.lora == "merged", "base_model", 'rl.engine.lora="merged": servers get all weights from the trainer'),
        (engine.lora == "adapter" and not engine.is_started, "base_model", at_urls),
    )
    if isinstance(engine, VllmConfig):
        wrong = {by: engine.way != "files", 'rl.engine.lora="adapter"': engine.lora == "adapter"}
        yield from unused("rl.engine", engine, *((is_wrong, "delta", cause) for cause, is_wrong in wrong.items()))
    own_arguments = OWN_ARGUMENTS | (SHARED_ARGUMENTS if engine.share_gpus else frozenset())
    if own := [argument for argument in engine.args if argument.split("=")[0] in own_arguments]:
        yield (
            f"rl.engine.args names {', '.join(own)}, which the run sets by its own fields. Take it out, and set the "
            "field."
        )


def _adapters(engine: ServedConfig, lora: LoraConfig, model: ModelConfig, max_staleness: int) -> Iterator[str]:
    if engine.lora == "merged":
        return
    wanted = 'rl.engine.lora="adapter"'
    if not lora.is_on:
        yield f'{wanted} with lora.rank="none": the policy has no adapters. Set rl.engine.lora="merged".'
        return
    if engine.is_started and engine.base_model is None:
        yield (
            f"{wanted} with servers that the run starts, and no rl.engine.base_model: the servers have to load the "
            "base by themselves. Name a Hugging Face folder of it (`mcore-rl convert export` makes one)."
        )
    if engine.way != "files":
        yield f'{wanted} with rl.engine.transport="{engine.way}": adapters come as files. Set it to "files".'
    if max_staleness:
        yield (
            f"{wanted} with rl.rollout.max_staleness={max_staleness}: a completion that goes on "
            "during an update would need adapters that are unloaded then. Set max_staleness=0, or "
            'rl.engine.lora="merged".'
        )
    ranks = {target: lora.rank_of(target, model) for target in lora.targets_in(model)}
    if engine.kind == "vllm" and (high := max(ranks.values(), default=0)) > VLLM_RANKS[-1]:
        yield (
            f"{wanted} with adapters of rank {high}: vLLM takes ranks up to {VLLM_RANKS[-1]}. Lower lora.rank, or set "
            'rl.engine.lora="merged".'
        )


def _fp8_blocks(engine: ServedConfig, config: RlRunConfig) -> Iterator[str]:
    """Check that servers can compute with weights in 8 bits, and that the probe can tell what they compute."""
    model, platform, parts = config.model, config.platform, engine.tensor_parallel
    widths = {
        "model.hidden_size": model.hidden_size * parts,
        "model.head_dim x num_heads": model.head_dim * model.num_heads,
        "model.head_dim x num_kv_heads": model.head_dim * max(model.num_kv_heads, parts),
        "model.ffn_hidden_size": 0 if all(model.moe_layers) else model.ffn_hidden_size,
        "model.moe.ffn_hidden_size": model.moe.ffn_hidden_size,
        "the shared experts' width": model.moe.shared_width,
    }
    uneven = ", ".join(f"{name}: {width // parts}" for name, width in widths.items() if width % (FP8_BLOCK * parts))
    is_fp32 = "fp32" in (engine.dtype, platform.precision * (engine.dtype == "auto"))
    te_copies = "TransformerEngine keeps 8-bit copies of its own, which the probe could not round"
    for is_wrong, setting, reason in (
        (engine.kind == "sglang", 'rl.engine.kind="sglang"', "it processes all of them again with each file of a push"),
        (config.lora.is_on, f"lora.rank={config.lora.rank}", "8 bits round away what adapters add to weights"),
        (platform.fp8 != "none", f'platform.fp8="{platform.fp8}"', te_copies),
        (is_fp32, "servers in fp32", "vLLM's products of 8-bit blocks are in bf16 or fp16 (rl.engine.dtype)"),
        (uneven, f"rl.engine.tensor_parallel={parts}", f"parts of a server are no multiples of {FP8_BLOCK}: {uneven}"),
    ):
        if is_wrong:
            yield f'rl.engine.weights="fp8_block" with {setting}: {reason}. Change that, or set "as_trained".'


def _completions(engine: ServedConfig, config: RlRunConfig) -> Iterator[str]:
    """Check that servers can run the model on the longest sample, and return what the run reads of them."""
    model, replay, rollout, kind = config.model, config.replay, config.rl.rollout, engine.kind
    longest = config.rl.prompts.max_tokens + config.rl.max_completion_tokens
    if model.family not in PROBED_FAMILIES:
        yield (
            f'model.family="{model.family}" with rl.engine.kind="{kind}": weights of this family have not been proved '
            f'on a server yet; they have of {", ".join(PROBED_FAMILIES)}. Set rl.engine.kind="native".'
        )
    if engine.max_model_len != "auto" and not longest <= engine.max_model_len <= model.max_position:
        yield (
            f"rl.engine.max_model_len={engine.max_model_len}; wanted at least {longest}, the longest prompt "
            f"with the longest completion, as a server cuts longer completions without a word, and at most "
            f'model.max_position={model.max_position}. Set it to "auto".'
        )
    if replay.wants_engine_routes and kind == "vllm" and engine.is_started and config.platform.device == "cpu":
        yield (
            f'rl.engine.kind="vllm" on platform.device="cpu" with replay.kind="{replay.kind}"'
            f"{', observe_rollout=true' if replay.observe_rollout else ''}: vLLM records no routes on CPUs. Set "
            'replay.kind="r2", or rl.engine.kind="native".'
        )
    eval_temperature, named = config.rl.eval.temperature, ", ".join(rollout.cuts)
    # SGLang reports those at the temperature and before the cut (layers/sampler.py:300).
    if kind == "vllm" and named and rollout.temperature != 1.0:
        yield (
            f'rl.rollout.temperature={rollout.temperature} with {named} and rl.engine.kind="vllm": vLLM reports '
            "logprobs before the temperature, or after the cut, and the ratios need those in between. Set "
            'temperature=1, or top_k=none, top_p=1 and min_p=0, or rl.engine.kind="sglang".'
        )
    elif kind == "vllm" and named and eval_temperature not in (0.0, 1.0):
        yield (
            f"rl.eval.temperature={eval_temperature} with {named}: vLLM reports logprobs at temperature 1 then. "
            "Set rl.eval.temperature to 0 or 1."
        )
