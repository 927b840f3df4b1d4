"""Updates of low-rank adapters on servers that have loaded the base model: a new name each time, then the probe."""

import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.engine import ServedConfig
from mcore_rl.convert.peft import write_served_adapter
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.adapters import adapters_off
from mcore_rl.model.global_tensors import gathered, local_shards
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.probe import ProbeReference
from mcore_rl.rl.engines.probe_difference import ProbeDifference, difference_of
from mcore_rl.rl.engines.server_api import ServerApi, ServerError
from mcore_rl.rl.engines.weight_push import PushReport, Sender, Stopwatch, WeightPush

SEEN = 0.1
"""Fraction of the probe's limit above which adapters must change at least a digit of a server's logprobs."""


class ServedAdapters:
    """Folder for adapters on their way to servers, and the names of loaded adapters. It exists on rank 0, for the whole
    run.
    """

    def __init__(self, parent: Path) -> None:
        """Create a folder in `parent`, which must be visible to trainer and servers; it is deleted with this object."""
        self._folder = tempfile.TemporaryDirectory(prefix="mcore_rl_adapters_", dir=parent)
        self.path = Path(self._folder.name)
        # A server may run as another user.
        self.path.chmod(0o755)
        self.names: dict[str, str] = {}
        """Name of the loaded adapter, by the server's address."""


class AdapterPush(WeightPush):
    """Sends the current adapters of the modules to servers, in place of weights.

    A server's prefix cache distinguishes adapters only by name, so each push uses a new name. The former adapter is
    unloaded after the new adapter has been probed. Base weights are not sent: the servers have loaded the base model,
    and the first push, while the adapters still add nothing, verifies it.
    """

    def __init__(
        self,
        *of_policy: *tuple[
            Sequence[ServerApi], Sequence[nn.Module], Mesh, ModelConfig, ServedConfig, Sampling
        ],
        lora: LoraConfig,
        served: ServedAdapters | None,
    ) -> None:
        """Prepare pushes.

        Args:
            of_policy: The arguments of `WeightPush`.
            lora: The section `lora`.
            served: Folder and names of the adapters, on rank 0; None on all other ranks.
        """
        super().__init__(*of_policy)
        self._lora, self._served = lora, served

    def push(self, version: int) -> PushReport:
        """Collective over the world: send the current adapters to all servers, and probe the servers.

        A server that fails does not raise; it is listed in the report.
        """
        watch = Stopwatch()
        ours = self._probe.reference(self._tolerance)
        with adapters_off(self._chunks):
            base_NT = self._probe.logprobs()
        watch.lap("trainer")
        shards = [shard for shard in local_shards(self._chunks) if ".adapter." in shard.key]
        tensors = gathered(shards, self._mesh)
        watch.lap("gather")
        sender, differences, fields = None, dict[str, ProbeDifference](), dict[str, Any]()
        if self._served is not None:
            sender = Sender(self._servers)
            fields = self._sent(sender, self._served, version, tensors, ours, base_NT, differences, watch)
        return self._report(sender, ours, differences, watch, version=version, **fields)

    def _sent(
        self,
        sender: Sender,
        served: ServedAdapters,
        version: int,
        tensors: dict[str, Tensor],
        ours: ProbeReference,
        base_NT: Tensor,
        differences: dict[str, ProbeDifference],
        watch: Stopwatch,
    ) -> dict[str, Any]:
        """Send the adapters to the servers and probe them, on rank 0. Returns fields of the report."""
        name = f"policy-{version:06d}-{secrets.token_hex(4)}"
        folder, num_bytes = served.path / name, 0
        is_seen = ours.limit.of(difference_of(ours.logprobs_NT, base_NT)) > SEEN * ours.limit.limit
        try:
            num_bytes = write_served_adapter(folder, tensors, self._lora, self._model)
        except (OSError, SafetensorError) as error:
            sender.fail_all(
                f"{folder}: the adapters cannot be written ({error}). Free space there, or name another folder: "
                "rl.engine.transport_dir"
            )
        watch.lap("gather")
        sender.everywhere("pause", lambda server: server.pause())
        watch.lap("pause")
        sender.everywhere("load of the adapters", lambda server: server.load_adapter(name, str(folder)))
        watch.lap("load")
        sender.everywhere("resume", lambda server: server.resume())
        watch.lap("finish")
        sender.everywhere(
            "probe", lambda server: self._compare_adapted(server, name, ours, differences, is_seen=is_seen)
        )
        sender.everywhere("unloading", lambda server: _unload(server, served.names.get(server.url)))
        # The adapters of a failed server are unknown: it is restarted, or keeps a name that no request uses.
        served.names = dict.fromkeys([server.url for server in sender.living], name)
        for former in served.path.iterdir():
            if former.name != name:
                shutil.rmtree(former)
        return {"num_bytes": num_bytes, "largest_bucket_bytes": num_bytes, "adapter": name}

    def _compare_adapted(
        self,
        server: ServerApi,
        name: str,
        ours: ProbeReference,
        differences: dict[str, ProbeDifference],
        *,
        is_seen: bool,
    ) -> None:
        """Probe a server. Raises ServerError if it does not compute with the base model and the adapters."""
        theirs = [server.prompt_logprobs(tokens, adapter=name) for tokens in self._probe.sequences]
        difference = differences[server.url] = ours.difference(theirs)
        if excess := ours.limit.excess(difference):
            raise ServerError(
                f"{server.url} does not have the trainer's weights although it has loaded the adapters {name}: it has "
                f"another base, or leaves some of them out: {excess}"
            )
        # If an adapter matches no module, the server answers with the base model and status 200.
        if is_seen and theirs == [server.prompt_logprobs(tokens) for tokens in self._probe.sequences]:
            raise ServerError(
                f"{server.url} answers under the name {name} as its base, to the last digit, though the adapters "
                "change these logprobs: they are bound to nothing there"
            )


def _unload(server: ServerApi, former: str | None) -> None:
    # A server that was restarted at the same address no longer has it.
    with suppress(ServerError):
        if former is not None:
            server.unload_adapter(former)
