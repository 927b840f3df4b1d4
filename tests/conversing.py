"""Conversations of an engine with environments; apart from their tests, so that ranks and workers can import them."""

import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.rollout import EnvironmentConfig, PromptConfig, RolloutConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.chat import Chat, load_chat
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.rl.engines.base import Engine, Sampling, sampling_of
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.environments.conversations import Conversations
from mcore_rl.rl.environments.interface import EnvironmentWorkers, environment_maker
from mcore_rl.rl.rollouts.rollout import runs_rewards
from mcore_rl.rl.types import Group, Problem, Prompt
from tests.generating import Tensors, loaded
from tests.hf_models import VOCAB
from tests.sections import engine_config
from tests.tokenizer_files import save_tokenizer

END = 0
"""Id that ends a turn and a document."""
LETTERS = tuple(range(1 + ord("a") - 32, 1 + ord("z") - 32 + 1))
"""Ids of lower-case letters, after which the turns of the tests end."""
TEMPLATE = (
    "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Echo:
    """Answers with the length and the beginning of each turn, which is worth half its number."""

    def __init__(self, turns: int = 99) -> None:
        self.left, self.count, self.fault = turns, 0, ""

    def start(self, prompt: Problem) -> list[dict[str, str]]:
        self.fault = prompt.answer
        return [{"role": "user", "content": prompt.prompt}]

    def step(self, completion: str) -> tuple[Sequence[dict[str, str]], float, bool]:
        self.count += 1
        reply = {"role": "user", "content": f"{len(completion)} {completion[:3]}"}
        return [reply], self.count / 2, self.count >= self.left


class Faulty(Echo):
    """Goes wrong in its second step, as the problem's answer says."""

    def start(self, prompt: Problem) -> list[dict[str, str]]:
        if prompt.answer == "refuse":
            raise ValueError("no such problem")
        return super().start(prompt)

    def step(self, completion: str) -> Any:
        answer = super().step(completion)
        if self.count < 2:
            return answer
        match self.fault:
            case "raise":
                raise KeyError("lost")
            case "hang":
                time.sleep(600)
            case "die":
                os._exit(3)
            case "junk":
                return "well done"
            case "text":
                return "well done", 0.0, False
            case "nothing":
                return [], 0.0, False
            case "nan":
                return answer[0], float("nan"), False
            case "lock":
                self.lock = threading.Lock()
            case "flood":
                return [{"role": "user", "content": "x" * 10**7}], 0.0, False
            case "long":
                return [{"role": "user", "content": "x" * 60}], 0.0, False
        return answer


def write_tokenizer(folder: Path) -> Path:
    """A token a character: of ASCII, and few others."""
    names = ["<end>", *map(chr, range(32, 127)), *map(chr, range(0xE0, 0xE0 + VOCAB - 96))]
    fields = {"eos_token": "<end>", "chat_template": TEMPLATE}
    save_tokenizer(folder, names, "?", ("<end>",), splits_characters=True, **fields)
    return folder


def config_of(model: ModelConfig, template: str = "tokenizer", **environment: Any) -> RlRunConfig:
    """A run whose turns have at most 8 tokens and mostly end with a letter."""
    config = RlRunConfig(
        model=model,
        rl=RlConfig(
            prompts=PromptConfig(max_tokens=40),
            rollout=RolloutConfig(max_new_tokens=8, stop_tokens=LETTERS),
            engine=engine_config(slots=5, step_tokens=16),
            environment=EnvironmentConfig(**({"name": "tests.conversing:Echo", "max_tokens": 100} | environment)),
        ),
    )
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_template": template})})


def problems(*answers: str) -> list[Prompt]:
    """Problems with these answers, whose prompts the environments make."""
    return [
        Prompt(
            problem=Problem(problem_id=str(index), prompt=f"{index}?" * (1 + index % 3), answer=answer),
            tokens_T=(1, 2, 3),
        )
        for index, answer in enumerate(answers)
    ]


def chat_of(config: RlRunConfig, folder: Path) -> tuple[Tokenizer, Chat]:
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    return tokenizer, load_chat(config.data.chat_template, tokenizer, str(folder))


def held(
    config: RlRunConfig,
    engine: Engine,
    folder: Path,
    mesh: Mesh,
    prompts: Sequence[Prompt],
    *,
    group_size: int = 2,
    with_routes: bool = False,
    ends: Sequence[int] = (),
) -> list[Group]:
    """Conversations about `prompts`, with seeds that depend on their problems."""
    tokenizer, _ = chat_of(config, folder)
    with conversations_of(config, engine, folder, mesh) as conversations:
        rules = sampling(config, tokenizer, ends, with_routes=with_routes)
        return conversations.hold(prompts, rules, [seeds_of(one, group_size) for one in prompts])


def seeds_of(prompt: Prompt, group_size: int = 2) -> list[int]:
    return [int(prompt.problem.problem_id) * 10 + g for g in range(group_size)]


@contextmanager
def conversations_of(config: RlRunConfig, engine: Engine, folder: Path, mesh: Mesh) -> Iterator[Conversations]:
    """Conversations with environments of the config, whose processes end on leaving."""
    _, chat = chat_of(config, folder)
    with ExitStack() as stack:
        workers = None
        if runs_rewards(mesh):
            environment = config.rl.environment
            workers = stack.enter_context(EnvironmentWorkers(environment_maker(environment), environment))
        yield Conversations(config.rl, engine, chat, mesh, workers)


def sampling(
    config: RlRunConfig, tokenizer: Tokenizer, ends: Sequence[int] = (), *, with_routes: bool = False
) -> Sampling:
    all_ends = {END, *ends, *config.rl.rollout.stop_tokens}
    return sampling_of(config.rl.rollout, all_ends, vocab_size=tokenizer.vocab_size, with_routes=with_routes)


def held_on(
    mesh_config: MeshConfig, config: RlRunConfig, tensors: Tensors, folder: Path, prompts: Sequence[Prompt]
) -> tuple[list[int], list[Group]]:
    """On a rank: its layers, all of which have experts, and this replica's conversations; other replicas than the first
    have fewer.
    """
    start(PlatformConfig())
    mesh = build_mesh(mesh_config)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    tokenizer, _ = chat_of(config, folder)
    engine = MegatronEngine(chunks, mesh, config.model, tokenizer.decode, config.rl.engine)
    own = prompts[: len(prompts) >> mesh.dp_cp.rank]
    groups = held(config, engine, folder, mesh, own, with_routes=True)
    return list(routed_layers(chunks)), [dataclasses.replace(group, reasons_G=()) for group in groups]
