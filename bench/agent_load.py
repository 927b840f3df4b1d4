"""Load of the endpoint for agents: sessions of many calls at once, on a stub of a server and on the native engine.

    python -m bench.agent_load --sessions 64 --calls 20 --engine stub native
    python -m bench.agent_load --sessions 128 --calls 20 --engine stub native

Agents are processes with Python's own HTTP client, whose history grows with each call. The stub is asked from threads,
as servers are, and answers at once; the native engine has 2 layers with experts. `endpoint_cpu_ms_per_call` is the CPU
time of this process outside of the engine, `overhead_ms_per_call` the wall time in which no engine computes.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.types import Group, Prompt
from tests.conversing import chat_of, problems, sampling, write_tokenizer
from tests.generating import loaded
from tests.hf_models import oracle
from tests.sections import engine_config
from tests.sessions import Scripted, agent_config, sessions_of

RESULTS = Path(__file__).parent / "results" / "agent_load.json"


class Stub(Scripted):
    """A scripted engine that is asked from threads, as servers are."""

    asks = True

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        """Return the script's answer."""
        return self.generate([prompt], sampling, [seeds_G])[0]

    def of_stage(self, group: Group, stage: int) -> Group:
        """Return the group: it has no routes."""
        return group


def measured(engine: Any, config: RlRunConfig, folder: Path, mesh: Mesh, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return what a session for each prompt takes, and how much of it is not the engine's."""
    spent, generate = [(0.0, 0.0)], engine.generate

    def timed(*args: Any) -> list[Group]:
        begin_cpu_s, begin_s = time.thread_time(), time.perf_counter()
        groups: list[Group] = generate(*args)
        spent.append((time.thread_time() - begin_cpu_s, time.perf_counter() - begin_s))
        return groups

    engine.generate = timed
    with sessions_of(config, engine, folder, mesh) as sessions:  # its processes are started before
        rules = sampling(config, chat_of(config, folder)[0])
        begin_cpu_s, begin_s = time.process_time(), time.perf_counter()
        groups = sessions.hold(prompts, rules, [[n] for n in range(len(prompts))])
        own_s, wall_s = time.process_time() - begin_cpu_s, time.perf_counter() - begin_s
    episodes = [one.episode for group in groups for one in group.completions if one.episode is not None]
    calls = sum(len(episode.turns) for episode in episodes)
    engine_cpu_s, engine_wall_s = map(sum, zip(*spent, strict=True))
    waits_s = wall_s if isinstance(engine, Stub) else wall_s - engine_wall_s
    return {
        "failed_sessions": sum(episode.failure is not None for episode in episodes),
        "calls": calls,
        "tokens_of_a_session": max(len(one.tokens_T) for group in groups for one in group.completions),
        "seconds": round(wall_s, 1),
        "calls_per_s": round(calls / wall_s, 1),
        "overhead_ms_per_call": round(1000 * waits_s / calls, 2),
        "endpoint_cpu_ms_per_call": round(1000 * (own_s - engine_cpu_s) / calls, 2),
    }


def main() -> None:
    """Measure, and write the figures, and keep those of other numbers of sessions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20, help="calls of each session")
    parser.add_argument("--engine", nargs="+", default=["stub", "native"], choices=["stub", "native"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    start(PlatformConfig())
    mesh = build_mesh(MeshConfig())
    seed_ranks(1)
    theirs, prompts, engines = oracle("qwen3_moe"), problems(*"a" * args.sessions), dict[str, Any]()
    model = theirs.ours.model_copy(update={"max_position": 4096})
    with TemporaryDirectory() as name:
        folder = write_tokenizer(Path(name))
        limits = {"sessions": args.sessions, "max_calls": args.calls, "max_tokens": 50 * args.calls}
        config = agent_config(model, "calling", arguments={"calls": args.calls}, timeout_s=3000.0, **limits)
        tokenizer, chat = chat_of(config, folder)
        for kind in args.engine:
            engines[kind] = Stub(lambda _: "fine", chat)
            if kind == "native":
                sizes = engine_config(slots=args.sessions, step_tokens=256)
                modules = loaded(model, theirs.tensors, mesh)
                engines[kind] = MegatronEngine(modules, mesh, model, tokenizer.decode, sizes)
            engines[kind] = measured(engines[kind], config, folder, mesh, prompts)
            print(kind, json.dumps(engines[kind]), flush=True)
    destroy_mesh()
    words = f"--sessions {args.sessions} --calls {args.calls} --engine {' '.join(args.engine)}"
    figures = {
        "command": f"python -m bench.agent_load {words}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": [round(load, 1) for load in os.getloadavg()],
        **engines,
    }
    others = json.loads(args.output.read_text()) if args.output.exists() else {}
    args.output.write_text(json.dumps(others | {f"{args.sessions} sessions": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
