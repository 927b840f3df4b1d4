"""Routes on disk, a file a rank, for a run that goes on on this or another mesh.

A file is MAGIC, the length and the CRC-32 of a JSON header, the header, and each sample's codes `[n, l, K]` with a
CRC-32 of their own in the header.
"""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.parallel.agree import on_every_rank
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.exchange import (
    Holding,
    Offer,
    Piece,
    Want,
    as_ranges,
    assembled,
    plan,
    positions,
    served,
)
from mcore_rl.replay.layouts import Layout

MAGIC = b"mcore_rl routes 1\n"
LENGTHS = struct.Struct("<QI")


def save(cache: RoutingCache, version: int, folder: Path, mesh: Mesh) -> None:
    """Collective over the world: what every rank holds of a version, a file each."""
    on_every_rank(lambda: _write(cache, version, folder / _name(version, mesh.world.rank, mesh.world.size)))


def load(cache: RoutingCache, version: int, folder: Path, layouts: Sequence[Layout], mesh: Mesh) -> None:
    """Collective over the world: `cache` then holds what a pass over `layouts` needs, from any mesh's files."""
    wanted = cache.wants(layouts, mesh)
    pieces = on_every_rank(lambda: _read(cache, version, folder, wanted))
    cache.drop(version)
    cache.put(version, pieces)


def _name(version: int, rank: int, size: int) -> str:
    return f"routes-{version}-{rank:05d}-of-{size:05d}"


def _write(cache: RoutingCache, version: int, path: Path) -> None:
    payload, samples = bytearray(), {}
    for sample, holding in cache.holdings(version).items():
        codes = holding.read(torch.arange(len(holding.position_n))).contiguous().numpy().tobytes()
        samples[sample] = {
            "num_tokens": holding.num_tokens,
            "ranges": as_ranges(holding.position_n),
            "sums": holding.sum_l.tolist(),
            "begin": len(payload),
            "bytes": len(codes),
            "crc32": zlib.crc32(codes),
        }
        payload += codes
    facts = {"version": version, "layers": cache.layers, "top_k": cache.top_k, "num_codes": cache.num_codes}
    header = json.dumps(facts | {"payload_bytes": len(payload), "samples": samples}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(MAGIC + LENGTHS.pack(len(header), zlib.crc32(header)) + header + payload)
    unfinished.replace(path)


def _read(cache: RoutingCache, version: int, folder: Path, wanted: dict[int, Want]) -> dict[int, Piece]:
    """What a rank needs, from all files that have a part of it."""
    files = [_File(path) for path in _complete(folder, version)]
    for file in files:
        file.check(cache)
    requests = plan(wanted, cache.layers, [file.offers() for file in files], 0)
    answers = [
        served(files[rank].holding(request.sample, cache), request)
        for rank in sorted(requests)
        for request in requests[rank]
    ]
    received = torch.frombuffer(bytearray(b"".join(answers) or b"\0"), dtype=torch.uint8)
    return assembled(wanted, requests, received, cache.form)


def _complete(folder: Path, version: int) -> list[Path]:
    paths = sorted(folder.glob(f"routes-{version}-*-of-*"))
    paths = [path for path in paths if path.suffix != ".tmp"]
    sizes = {path.name.rpartition("-")[2] for path in paths}
    if len(sizes) != 1 or len(paths) != int(next(iter(sizes))):
        raise CheckpointError(
            f"{folder} has {len(paths)} files of routes of version {version}, of {sorted(sizes)} ranks, where one of "
            "each rank of one run is wanted. Start the step again without them."
        )
    return paths


class _File:
    """An open file, its header read and checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = path.read_bytes()
        start = len(MAGIC) + LENGTHS.size
        if self._bytes[: len(MAGIC)] != MAGIC or len(self._bytes) < start:
            raise self._damaged("it does not begin like a file of routes")
        length, crc = LENGTHS.unpack_from(self._bytes, len(MAGIC))
        header = self._bytes[start : start + length]
        if len(header) != length or zlib.crc32(header) != crc:
            raise self._damaged("its header does not have its checksum")
        self._header: dict[str, Any] = json.loads(header)
        self._start = start + length
        if len(self._bytes) != self._start + self._header["payload_bytes"]:
            raise self._damaged("it is not as long as it says")

    def check(self, cache: RoutingCache) -> None:
        """CheckpointError unless these are routes of the same model."""
        theirs = (self._header["top_k"], self._header["num_codes"])
        if theirs != (cache.top_k, cache.num_codes):
            raise CheckpointError(
                f"{self._path} has routes of another model: top-k and codes are {theirs}, wanted "
                f"{(cache.top_k, cache.num_codes)}. Start the step again without them."
            )

    def offers(self) -> dict[int, Offer]:
        """See plan."""
        layers = tuple(self._header["layers"])
        return {
            int(sample): (facts["num_tokens"], layers, tuple((begin, end) for begin, end in facts["ranges"]))
            for sample, facts in self._header["samples"].items()
        }

    def holding(self, sample: int, cache: RoutingCache) -> Holding:
        """The sample, its codes checked."""
        facts, layers = self._header["samples"][str(sample)], tuple(self._header["layers"])
        begin = self._start + facts["begin"]
        codes = self._bytes[begin : begin + facts["bytes"]]
        if zlib.crc32(codes) != facts["crc32"]:
            raise self._damaged(f"the routes of sample {sample} do not have their checksum")
        codes_nlK = (
            torch.frombuffer(bytearray(codes) or bytearray(1), dtype=torch.uint8)[: len(codes)]
            .view(cache.dtype)
            .view(-1, len(layers), cache.top_k)
        )
        return Holding(
            num_tokens=facts["num_tokens"],
            layers=layers,
            position_n=positions(tuple(tuple(pair) for pair in facts["ranges"])),
            sum_l=torch.tensor(facts["sums"], dtype=torch.int64),
            read=lambda row_n: codes_nlK[row_n],
        )

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {why}. Start the step again without it.")
