"""Messages between the ranks in torch's key-value store that other users of the network cannot forge.

A TCPStore has no password: whoever reaches its port can read and write. Each message has an HMAC-SHA256 over key and
text, with a secret in a file of the launcher that only the user can read. Others are ignored and reported once.

Deleting messages, stopping the server and disturbing torch's own rendezvous are not prevented: see docs/slurm.md.
"""

import hmac
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:  # the launcher, which only writes the secret, imports no torch
    from torch.distributed import Store  # type: ignore[attr-defined]

SECRET_FILE = "MCORE_RL_SECRET_FILE"
"""Environment variable with the file that holds the secret of a run's ranks."""


def write_secret(path: Path) -> None:
    """Write a new secret, readable only by this user, in place of an older secret."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def secret_of_launcher() -> bytes:
    """Return the secret of this run's ranks; empty, and without protection, if the launcher gives none. Raises
    ConfigError if its file cannot be read, is empty, or can be read by other users.
    """
    path = os.environ.get(SECRET_FILE)
    if not path:
        return b""
    try:
        if Path(path).stat().st_mode & 0o077:
            raise ConfigError(f"{SECRET_FILE}={path} can be read by other users. Run: chmod 600 {path}")
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE}={path} cannot be read: {error}") from None
    if not secret:
        raise ConfigError(f"{SECRET_FILE}={path} is empty. Write a random text into it, the same for all ranks.")
    return secret


class SignedStore:
    """Texts by key in a `torch.distributed.Store`; texts without the right signature count as missing."""

    def __init__(self, store: "Store", scope: str, secret: bytes) -> None:
        """Use `scope` as a prefix of all keys; messages of other scopes (earlier attempts) are not valid here."""
        self._store, self._scope, self._secret = store, scope, secret
        self._reported: set[str] = set()

    def write(self, key: str, text: str) -> None:
        """Set a text under a key."""
        self._store.set(self._full(key), self._signature(key, text) + text)

    def read(self, key: str) -> str | None:
        """Return the text under a key; None if there is none, or none that a rank wrote."""
        if not self._store.check([self._full(key)]):
            return None
        return self._verified(key, self._store.get(self._full(key)))

    def claim(self, key: str, text: str) -> str:
        """Set a text under a key unless a rank has done so before, and return the text that is there then."""
        message = self._signature(key, text) + text
        before = self._verified(key, self._store.compare_set(self._full(key), "", message))
        if before is None:  # a forgery: it must not keep the ranks from reporting their failure
            self._store.set(self._full(key), message)
        return text if before is None else before

    def exists(self, key: str) -> bool:
        """Return whether there is anything under a key, valid or not."""
        return bool(self._store.check([self._full(key)]))

    def _full(self, key: str) -> str:
        return f"{self._scope}/{key}"

    def _signature(self, key: str, text: str) -> str:
        # The key's length separates its end from the text's beginning.
        full = self._full(key)
        return hmac.digest(self._secret, f"{len(full)}:{full}{text}".encode(), "sha256").hex()

    def _verified(self, key: str, message: bytes) -> str | None:
        signature, text = message[:64], message[64:].decode(errors="replace")
        if hmac.compare_digest(signature, self._signature(key, text).encode()):
            return text
        if key not in self._reported:
            self._reported.add(key)
            sys.stderr.write(
                f"Ignored a message of the ranks' store without a valid signature (key {key!r}): a process that is "
                "none of this run's ranks writes to its port.\n"
            )
        return None
