"""Creation of the rollout engine named in the config."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from mcore_rl.config.extension import choose
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.engine import InProcessConfig, ServedConfig
from mcore_rl.config.rl.section import RlConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Capabilities, Engine, QuietEngine, Sampling, sampling_of
from mcore_rl.rl.engines.http_client import HttpClient
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.engines.served import ServedEngine
from mcore_rl.rl.engines.server_api import ServerApi
from mcore_rl.rl.engines.server_fleet import ServerFleet
from mcore_rl.rl.engines.server_process import ServerCommand, ServerProcess, served_length, server_command
from mcore_rl.rl.engines.sglang_api import SglangApi
from mcore_rl.rl.engines.vllm_api import VllmApi, logprobs_mode
from mcore_rl.workers.launcher import environment_variable

Decode = Callable[[Sequence[int]], str]
VERSIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vllm": ((0, 32), (0, 34)),
    "sglang": ((0, 5, 23), (0, 5, 24)),
}
"""For each kind of server, the first version that was tried or read, and the first later version that was not."""


def native_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Return the engine that generates with the training modules `chunks`."""
    assert isinstance(config.rl.engine, InProcessConfig)
    return MegatronEngine(chunks, mesh, config.model, decode, config.rl.engine)


def served_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Return the engine that generates on servers. With rl.engine.count, rank 0 starts the servers.

    `update_weights` must be called before the first request.
    """
    engine, folder, tokenizer = config.served, servers_folder(config.run_dir), config.data.tokenizer
    assert engine is not None
    vocab_size = config.model.vocab_size if tokenizer.kind == "none" else load_tokenizer(tokenizer).vocab_size
    api_at = server_apis(engine, config.model)
    on_gpu = next(chunks[0].parameters()).is_cuda
    fleet = None
    if mesh.world.rank == 0:
        if engine.transport_dir is not None:
            Path(engine.transport_dir).mkdir(parents=True, exist_ok=True)
        start = (
            partial(
                start_server_of,
                engine,
                partial(server_command, config, folder, on_gpu=on_gpu),
                folder,
            )
            if engine.count
            else None
        )
        fleet = ServerFleet(engine, api_at, folder, start, partial(refuse_version, engine.kind))
    return ServedEngine(
        api_at,
        fleet,
        chunks,
        mesh,
        config.model,
        decode,
        engine,
        sampling=sampling_of(config.rl.rollout, (), vocab_size=vocab_size, with_routes=False),
        capabilities=Capabilities(
            max_tokens=served_length(config.longest_sample, config.model, engine),
            routes=config.wants_engine_routes,
            seeded=False,
        ),
        refusal=partial(refused_sampling, config.rl),
        imposes_routes=config.replay.kind == "r3",
        may_miss_routes=config.replay.missing != "error",
        adapters=config.lora if engine.lora == "adapter" else None,
    )


def servers_folder(run_dir: str) -> Path:
    """Return the folder of a run's server logs and state."""
    return Path(run_dir) / "servers"


def start_server_of(
    engine: ServedConfig, command: Callable[[int], ServerCommand], folder: Path, index: int
) -> ServerProcess:
    """Start server `index` of rl.engine.count; its log is `server_<index>.log` in `folder`."""
    size = engine.tensor_parallel
    return ServerProcess(
        command,
        folder / f"server_{index}.log",
        devices=engine.devices[index * size : (index + 1) * size],
    )


def server_apis(engine: ServedConfig, model: ModelConfig) -> Callable[[str], ServerApi]:
    """Return a function that maps a server's address to its API.

    Raises:
        ConfigError: if the environment variable named by rl.engine.api_key_env is not set.
    """
    key = environment_variable(engine.api_key_env) if engine.api_key_env else None
    if engine.api_key_env and key is None:
        raise ConfigError(
            f"the key of the servers is to be read from the environment variable {engine.api_key_env}, which is not "
            "set here. Export it, or clear rl.engine.api_key_env or --api-key-env."
        )

    def api_at(url: str) -> ServerApi:
        http = HttpClient(url, api_key=key, ca_file=engine.ca_file)
        if engine.kind == "vllm":
            return VllmApi(
                http,
                vocab_size=model.vocab_size,
                request_timeout_s=engine.request_timeout_s,
                update_timeout_s=engine.update_timeout_s,
            )
        return SglangApi(
            http,
            vocab_size=model.vocab_size,
            experts_per_token=model.moe.top_k,
            request_timeout_s=engine.request_timeout_s,
            update_timeout_s=engine.update_timeout_s,
        )

    return api_at


def refuse_version(kind: str, api: ServerApi) -> None:
    """Raise EngineError if a server runs an untested software version.

    The answers of such a server may have a different meaning, and its weight updates may be silently wrong.
    """
    version = api.version()
    first, beyond = VERSIONS[kind]
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdecimal())
    if not first <= numbers < beyond:
        raise EngineError(
            f"{api.url} is {kind} {version}; tried are versions from {_dotted(first)} to below {_dotted(beyond)}. "
            "Install one of these."
        )


def refused_sampling(rl: RlConfig, sampling: Sampling) -> str | None:
    """Return why a server cannot report logprobs at the sampling temperature before top-k, top-p and min-p.

    None if it can.
    """
    started = sampling_of(rl.rollout, (), vocab_size=0, with_routes=False).cut
    if rl.engine.kind == "sglang" or sampling.cut.temperature == 0.0:
        return None
    wanted = logprobs_mode(sampling.cut)
    is_any = sampling.cut.is_open and sampling.cut.temperature == 1.0
    if is_any or wanted == logprobs_mode(started):
        return None
    return (
        f"a completion is asked for at {sampling.cut}, and the servers report the logprobs of {started}: a server has "
        "one --logprobs-mode. Sample with temperature 1, or without top_k, top_p and min_p, everywhere."
    )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


ENGINES: dict[str, Callable[[RlRunConfig, Sequence[nn.Module], Mesh, Decode], Engine]] = {
    "native": native_engine,
    "vllm": served_engine,
    "sglang": served_engine,
}


def make_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Collective over the world: create the engine of `rl.engine.kind`; `decode` converts token ids to text.

    Raises:
        ConfigError: if a user-defined engine lacks members of `Engine`.
    """
    engine = choose("rl.engine.kind", config.rl.engine.kind, ENGINES)(config, chunks, mesh, decode)
    if missing := [name for name in vars(Engine) if not name.startswith("_") and not hasattr(engine, name)]:
        quiet = [name for name in missing if hasattr(QuietEngine, name)]
        raise ConfigError(
            f"rl.engine.kind={config.rl.engine.kind} makes {type(engine).__name__}, which has no {', '.join(missing)} "
            "(rl.engines.base.Engine). Add them"
            + (f"; rl.engines.base.QuietEngine as a base has {', '.join(quiet)}." if quiet else ".")
        )
    return engine
