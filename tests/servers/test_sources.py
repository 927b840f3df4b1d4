"""The table of protocols, routes and the worker's extension against the servers' own source, without a GPU.

MCORE_RL_VLLM_SOURCE and MCORE_RL_SGLANG_SOURCE name the package's folder, as `pip download --no-deps` brings it:
.../vllm and .../sglang. A test without its source is skipped.
"""

import ast
import base64
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mcore_rl.rl.engines.protocol import PROTOCOLS, REQUIRED, SWALLOWED
from mcore_rl.rl.engines.sglang_api import read_flat
from mcore_rl.rl.engines.vllm_api import read_npy
from tests.fake_server import FakeServer

SOURCES = {kind: os.environ.get(f"MCORE_RL_{kind.upper()}_SOURCE") for kind in PROTOCOLS}
ROUTES = {"vllm": "entrypoints", "sglang": "srt/entrypoints"}
NOT_ITS_DEFAULT = {("/update_weights_from_disk", "load_format")}
"""The table has that of servers which a run starts."""


def source_of(kind: str) -> Path:
    if SOURCES[kind] is None:
        pytest.skip(f"MCORE_RL_{kind.upper()}_SOURCE is not set")
    return Path(str(SOURCES[kind]))


def trees(folder: Path) -> Iterator[ast.Module]:
    for file in sorted(folder.rglob("*.py")):
        yield ast.parse(file.read_text())


def routes_in(folder: Path) -> dict[str, ast.AsyncFunctionDef]:
    """Functions of the source by the path that a decorator, or add_api_route, gives them."""
    found: dict[str, ast.AsyncFunctionDef] = {}
    for tree in trees(folder):
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
        for function in functions.values():
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant):
                    found.setdefault(str(decorator.args[0].value), function)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_api_route"):
                path, name = node.args[0], ast.unparse(node.args[1])
                if isinstance(path, ast.Constant) and name in functions:
                    found.setdefault(str(path.value), functions[name])
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "Mount"
                and isinstance(node.args[0], ast.Constant)
            ):
                (function,) = ast.parse("async def mounted(): ...").body
                found.setdefault(str(node.args[0].value), function)  # type: ignore[arg-type]
    return found


def literal(node: ast.expr | None) -> Any:
    if node is None:
        return REQUIRED
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_every_path_of_the_table_is_a_route_of_the_server(kind: str) -> None:
    routes = routes_in(source_of(kind) / ROUTES[kind])
    assert PROTOCOLS[kind].keys() <= routes.keys(), PROTOCOLS[kind].keys() - routes.keys()


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_what_a_server_says_of_a_call_in_a_wrong_state_is_in_its_source(kind: str) -> None:
    text = "".join(file.read_text() for file in source_of(kind).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    for path, call in PROTOCOLS[kind].items():
        for refusal in call.refusals:
            if refusal.status > SWALLOWED:
                assert refusal.text in joined, (path, refusal.text)


def test_fields_and_defaults_of_sglangs_calls_are_those_of_its_classes() -> None:
    folder = source_of("sglang")
    routes = routes_in(folder / ROUTES["sglang"])
    classes: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse((folder / "srt/managers/io_struct.py").read_text())):
        if isinstance(node, ast.ClassDef):
            fields = {f.target.id: literal(f.value) for f in node.body if isinstance(f, ast.AnnAssign)}  # type: ignore[union-attr]
            bases = [classes.get(ast.unparse(base), {}) for base in node.bases]
            classes[node.name] = {name: default for base in (*bases, fields) for name, default in base.items()}
    num_compared = 0
    for path, call in PROTOCOLS["sglang"].items():
        annotated = " ".join(ast.unparse(a.annotation) for a in routes[path].args.args if a.annotation)
        named = [name for name in re.findall(r"\w+", annotated) if name in classes]
        if call.place != "body" or not named:
            continue
        theirs = classes[named[0]]
        assert call.fields.keys() <= theirs.keys(), (path, call.fields.keys() - theirs.keys())
        for name, default in call.fields.items():
            if (path, name) not in NOT_ITS_DEFAULT and default is not REQUIRED:
                assert theirs[name] == default or "None" in str(theirs[name]), (path, name, theirs[name])
        num_compared += 1
    assert num_compared > 10


def test_fields_and_defaults_of_vllms_calls_are_those_of_its_functions() -> None:
    """Calls with a query have these; the bodies of the others are read by name."""
    folder = source_of("vllm")
    routes = routes_in(folder / ROUTES["vllm"])
    text = "".join(file.read_text() for file in (folder / "entrypoints").rglob("*.py"))
    for path, call in PROTOCOLS["vllm"].items():
        arguments = routes[path].args
        defaults = dict(zip((a.arg for a in reversed(arguments.args)), reversed(arguments.defaults), strict=False))
        for name, default in call.fields.items():
            assert re.search(rf"\b{name}\b", text), (path, name)
            if name in defaults:
                found = literal(defaults[name])
                assert str(default).lower() in str(found).lower().replace("'", '"'), (path, name, found)


def function_of(file: Path, name: str) -> Any:
    """A function of the source alone, with what it names."""
    (node,) = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name]
    names = {"np": np, "io": io, "pybase64": base64}
    exec(ast.unparse(node), names)
    return names[name]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_routes_are_read_as_vllm_writes_them(dtype: str) -> None:
    """[prompt + output - 1, layers, K] of the smallest type that holds the experts."""
    writes = function_of(source_of("vllm") / "utils/serial_utils.py", "numpy2base64")
    experts_TLK = np.random.default_rng(1).integers(0, 200, (7, 3, 2)).astype(dtype)
    assert read_npy(writes(experts_TLK)).tolist() == experts_TLK.tolist()


def test_routes_are_read_as_sglangs_own_reader_reads_them() -> None:
    reads = function_of(
        source_of("sglang") / "srt/state_capturer/routed_experts.py", "extract_routed_experts_from_meta_info"
    )
    experts_TLK = np.random.default_rng(1).integers(0, 200, (7, 3, 2)).astype(np.int32)
    with FakeServer(kind="sglang") as server:
        asked = SimpleNamespace(prompt=(1, 2, 3))
        text = server._routes(experts_TLK.astype(np.int64), 5, asked, None)  # type: ignore[arg-type]
    assert read_flat(str(text), 7, 2).tolist() == experts_TLK.tolist()
    assert reads({"meta_info": {"routed_experts": text}}).tolist() == experts_TLK.flatten().tolist()


class Packs:
    """A quantization method that packs: rows in another order."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data = layer.weight.data.flip(0)  # type: ignore[union-attr, operator]


class Fused(nn.Module):
    """Like a fused module of vLLM: q, k and v of a checkpoint are parts of one weight, packed when it is whole."""

    def __init__(self, method: type) -> None:
        super().__init__()
        self.quant_method = method()
        self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.weight.weight_loader = lambda param, loaded, part: param.data[2 * part : 2 * part + 2].copy_(loaded)

    def load(self, part: int, value: float) -> None:
        self.weight.weight_loader(param=self.weight, loaded=torch.full((2, 4), value), part=part)


@pytest.fixture
def worker_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """mcore_rl/vllm_worker.py with vLLM's own code for reloads, and stubs of what else it imports."""
    folder = source_of("vllm")

    def stub(name: str, **members: object) -> ModuleType:
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *a, **k: None

    class Generic:
        def __class_getitem__(cls, item: object) -> type:
            return cls

    layers, loader = "vllm.model_executor.layers", "vllm.model_executor.model_loader"
    for name in ("vllm", "vllm.model_executor", layers, f"{layers}.quantization", loader, "vllm.distributed"):
        stub(name)
    stub("vllm.config", ModelConfig=object, VllmConfig=object)
    stub("vllm.logger", init_logger=lambda name: Silent())
    stub(f"{layers}.attention", is_deferred_attention_layer=lambda layer: False)
    stub(f"{layers}.quantization.base_config", QuantizeMethodBase=Packs)
    for name in ("fp8", "moe_base"):
        empty = {"OnlineLinearBase": type("L", (), {}), "OnlineMoEMethodBase": type("M", (), {})}
        stub(f"{layers}.quantization.online.{name}", **empty)
    stub(f"{loader}.utils", online_quantization_timing_context=None)
    stub(f"{loader}.weight_utils", default_weight_loader=lambda param, loaded: param.data.copy_(loaded))
    reload = stub(f"{loader}.reload")
    reload.__path__ = [str(folder / "model_executor/model_loader/reload")]
    layerwise = importlib.import_module(f"{loader}.reload.layerwise")
    for name in ("finalize_layerwise_reload", "initialize_layerwise_reload"):
        setattr(reload, name, getattr(layerwise, name))
    parts = {"WeightTransferUpdateInfo": object, "WeightTransferInitInfo": object, "WeightTransferEngine": Generic}
    base = stub("vllm.distributed.weight_transfer.base", **parts)
    stub("vllm.distributed.weight_transfer", base=base)
    stub("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=Silent())
    monkeypatch.delitem(sys.modules, "mcore_rl.vllm_worker", raising=False)
    module = importlib.import_module("mcore_rl.vllm_worker")
    monkeypatch.delitem(sys.modules, "mcore_rl.vllm_worker")
    return module


@pytest.mark.parametrize("is_aborted", [True, False])
def test_after_abort_update_one_whole_push_is_right_and_without_it_wrong(
    is_aborted: bool, worker_module: ModuleType
) -> None:
    layerwise, model = worker_module.layerwise, nn.ModuleDict({"qkv": Fused(Packs)})
    engine = worker_module.FileEngine.__new__(worker_module.FileEngine)
    engine.model, engine.model_config, engine.device = model, None, torch.device("cpu")
    engine.reset_weight_update_target = lambda: None
    layerwise.record_metadata_for_reloading(model)

    def push(value: float, parts: tuple[int, ...] = (0, 1, 2)) -> None:
        engine.start_weight_update()
        with torch.device("cpu"):
            for part in parts:
                model["qkv"].load(part, value)  # type: ignore[operator]

    push(1.0)
    engine.finish_weight_update()
    push(7.0, parts=(0, 1))  # fails after two thirds of the module
    worker = SimpleNamespace(weight_transfer_engine=engine, _weight_update_active=False)
    abort = partial(worker_module.Extension.abort_update, worker)
    if is_aborted:
        abort()
        abort()  # harmless where nothing was left
        assert model["qkv"].weight.unique().tolist() == [1.0]
    push(2.0)
    engine.finish_weight_update()
    rows = model["qkv"].weight.flip(0)[::2, 0].tolist()
    assert (rows == [2.0, 2.0, 2.0]) == is_aborted, rows
