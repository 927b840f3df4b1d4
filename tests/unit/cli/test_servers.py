"""`mcore-rl probe` finds what weights a server lacks; `mcore-rl serve` starts servers anew that end or are asked to."""

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from mcore_rl.cli.cli import main
from mcore_rl.config.load import dump_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh, seed_ranks
from mcore_rl.model.build import build_model, local_shards
from mcore_rl.rl.engines.probe import probe_sequences
from mcore_rl.rl.engines.server_api import HttpClient, ServerError
from mcore_rl.rl.engines.server_process import registration, replacement_request
from mcore_rl.storage.checkpoints.write import save_weights
from mcore_rl.workers.launcher import free_port
from tests.fake_server import FakeServer, TableAnswers
from tests.forked import RunningCommand, wait_for
from tests.tiny_models import TINY

MODEL = TINY["qwen3_moe"]


class Scores(TableAnswers):
    def __init__(self, score: Callable[[Sequence[int]], list[float]]) -> None:
        super().__init__()
        self._score = score

    def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
        return [{token: logprob} for token, logprob in zip(tokens[1:], self._score(tokens), strict=True)]


class Run:
    """A run with a checkpoint, an older one beside it, and the model with any mixture of their weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "config.toml").write_text(dump_config(PretrainConfig(model=MODEL)))
        platform, mesh = platforms.start(PlatformConfig()), build_mesh(MeshConfig())
        seed_ranks(1)
        self.chunks: list[nn.Module] = build_model(MODEL, mesh, platform, PlatformConfig())
        self.set_weights(older="")
        save_weights(self.chunks, mesh, MODEL, folder / "checkpoints")
        self.set_weights(older=".")
        self.older = save_weights(self.chunks, mesh, MODEL, folder / "older")
        self.logprobs = {part: self.table(part) for part in ("", ".experts.")}
        """Logprobs of the probe's sequences with the older weights of a part."""
        destroy_mesh()
        platforms.stop()

    @torch.no_grad()
    def set_weights(self, older: str) -> None:
        """Set the weights to the run's, and those whose keys contain `older`, if it is a text, to the older ones."""
        for index, shard in enumerate(local_shards(self.chunks)):
            seed = index + 1000 * bool(older and older in shard.key)
            noise = torch.randn(shard.data.shape, generator=torch.Generator().manual_seed(seed))
            shard.data.copy_(1 + 0.3 * noise if "norm" in shard.key else 0.15 * noise)

    @torch.no_grad()
    def table(self, older: str) -> dict[tuple[int, ...], list[float]]:
        self.set_weights(older)
        sequences = probe_sequences(96, MODEL.vocab_size)
        ids_NS = torch.tensor(sequences)
        positions_NS = torch.arange(ids_NS.shape[1]).expand_as(ids_NS)
        logits_NSV = self.chunks[0].eval()(ids_NS, positions_NS, attention_mask=None)
        logprobs_NSV = logits_NSV[:, :-1, : MODEL.vocab_size].double().log_softmax(-1)
        picked_NT = logprobs_NSV.gather(2, ids_NS[:, 1:, None])[..., 0].tolist()
        return dict(zip(sequences, picked_NT, strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def no_mesh_left() -> Iterator[None]:
    yield
    destroy_mesh()
    platforms.stop()


def probed(run: Run, older: str, *words: str) -> int:
    """The exit status of a probe of a server with the older weights of a part."""
    with FakeServer(Scores(lambda tokens: run.logprobs[older][tuple(tokens)])) as server:
        return main(["probe", str(run.folder), "--url", server.url, *words])


def test_a_server_with_the_weights_has_status_0(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert probed(run, "") == 0
    shown = capsys.readouterr().out
    assert "has these weights" in shown and "<-" not in shown
    # Every group of the model is one that the probe would notice.
    rows = [line.rsplit(maxsplit=2) for line in shown.split("logprobs\n")[1].splitlines()[1:]]
    assert {row[0] for row in rows} == {"embedding", "head", "router", "experts", "attention", "norms"}
    assert all(float(changed) > 2e-4 for _, changed, _ in rows)


@pytest.mark.matrix("fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_server_that_lacks_one_group_is_shown_to_lack_it(
    dtype: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probed(run, ".experts.", "--dtype", dtype, "--older", str(run.older)) == 1
    shown = capsys.readouterr().out
    assert "does NOT have these weights" in shown and "not seen" not in shown
    marked = [line.split()[0] for line in shown.splitlines() if "<- this is what the server has" in line]
    assert marked == ["experts"]


@pytest.mark.full
def test_what_rounding_hides_of_a_server_in_bf16_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that are 1 % larger change logprobs by less than bf16 does."""
    assert probed(run, "", "--dtype", "bf16") == 0
    shown = capsys.readouterr().out
    assert "has these weights up to rounding" in shown and "the expert that stands out most is" in shown
    rows = shown.split("logprobs\n")[1].splitlines()[1:]
    limit = float(shown.split("the limit is ")[1].split()[0])
    assert len(rows) == 6
    for row in rows:
        assert (float(row.split()[1]) < limit) == row.endswith("less than the limit: such a change is not seen")
    assert any("not seen" in row for row in rows)


def test_a_server_that_is_not_there_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["probe", str(run.folder), "--url", "http://127.0.0.1:9"])
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.full
def test_a_server_that_asks_for_a_key_gets_the_one_of_the_variable(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = Scores(lambda tokens: run.logprobs[""][tuple(tokens)])
    with FakeServer(scores, api_key="secret") as server:
        words = ["probe", str(run.folder), "--url", server.url, "--api-key-env", "SERVER_KEY"]
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "environment variable SERVER_KEY, which is not set" in capsys.readouterr().err
        monkeypatch.setenv("SERVER_KEY", "secret")
        assert main(words) == 0
    assert "secret" not in capsys.readouterr().out


FAKE = str(Path(__file__).parents[2] / "fake_server.py")


def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(
        f"run_dir = '{tmp_path}/run'\n[platform]\ndevice = 'cpu'\n[rl.prompts]\ntask = 'arithmetic'\n"
        f"[rl.engine]\nkind = 'vllm'\ncommand = {json.dumps([sys.executable, FAKE])}\n"
    )
    return path


@pytest.mark.full
def test_servers_that_end_or_lack_the_weights_are_started_anew_and_all_end_with_it(tmp_path: Path) -> None:
    port = free_port()
    http = HttpClient(f"http://127.0.0.1:{port}")

    def answers() -> bool:
        try:
            return http.get("/health", timeout_s=2) is None
        except ServerError:
            return False

    joined, url = str(tmp_path / "joined"), f"http://{socket.gethostname()}:{port}"
    words = ["serve", config_file(tmp_path), "--port", port, f"rl.engine.servers_dir={joined}"]
    process = RunningCommand(words, tmp_path / "output")
    try:
        wait_for(answers)
        wait_for(registration(joined, url).exists)
        fake = next(p for p in psutil.Process(process.pid).children(recursive=True) if p.cmdline()[1:2] == [FAKE])
        fake.kill()
        wait_for(lambda: "started anew, as it has ended" in process.text)
        wait_for(answers)
        request = replacement_request(tmp_path / "run/servers", f"http://{socket.gethostname()}:{port}")
        request.parent.mkdir(parents=True, exist_ok=True)
        request.write_text("its probe failed\n")
        wait_for(lambda: "as the training asks for it (its probe failed)" in process.text)
        wait_for(answers)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not psutil.wait_procs(children, timeout=120)[1]
        assert not registration(joined, url).exists()
        assert "started with --served-model-name policy" in next(tmp_path.glob("run/servers/*.log")).read_text()
    finally:
        process.kill()


def test_the_native_engine_has_no_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(config_file(tmp_path)), "rl.engine.kind=native", "rl.engine.command=none"]) == 2
    assert 'rl.engine.kind="native" has no servers. Set rl.engine.kind="vllm"' in capsys.readouterr().err
