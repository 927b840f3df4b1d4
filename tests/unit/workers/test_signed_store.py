"""Messages of ranks in a store to which others can write."""

import hashlib
import hmac

import pytest
from torch.distributed import HashStore

from mcore_rl.errors import ConfigError
from mcore_rl.workers.signed_store import SECRET_FILE, SignedStore, secret_of_launcher, write_secret


def test_a_message_is_read_by_those_who_have_the_secret_and_by_no_others(capsys):
    store = HashStore()
    SignedStore(store, "run/0", b"secret").write("failure", "the cause")
    assert SignedStore(store, "run/0", b"secret").read("failure") == "the cause"
    assert SignedStore(store, "run/0", b"guessed").read("failure") is None
    assert "key 'failure'" in capsys.readouterr().err
    # The format by hand: HMAC-SHA256 over the length of the key, the key, and the text.
    expected = hmac.new(b"secret", b"13:run/0/failurethe cause", hashlib.sha256).hexdigest() + "the cause"
    assert store.get("run/0/failure") == expected.encode()


@pytest.mark.parametrize("forged", [b"", b"[1, 'forged']", b"0" * 64 + b"text", b"\xff" * 100])
def test_what_others_write_does_not_exist_and_is_reported_once(forged, capsys):
    store = HashStore()
    ours = SignedStore(store, "run/0", b"secret")
    store.set("run/0/first", forged)
    assert ours.read("first") is None and ours.read("first") is None
    assert capsys.readouterr().err.count("without a valid signature") == 1
    assert ours.claim("first", "3") == "3" and ours.read("first") == "3"
    assert ours.claim("first", "4") == "3", "the first claim of a rank stands"


def test_a_message_cannot_be_played_again_under_another_key_or_in_another_attempt():
    store = HashStore()
    ours = SignedStore(store, "run/0", b"secret")
    ours.write("host/1", "failure")
    for key in ("run/0/failure", "run/0/host/2", "run/1/host/1"):
        store.set(key, store.get("run/0/host/1"))
    assert ours.read("failure") is None and ours.read("host/2") is None
    assert SignedStore(store, "run/1", b"secret").read("host/1") is None


def test_the_secret_is_a_file_of_this_user_alone(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    monkeypatch.setenv(SECRET_FILE, str(path))
    write_secret(path)
    first = secret_of_launcher()
    assert path.stat().st_mode & 0o777 == 0o600 and len(first) == 64
    write_secret(path)
    assert secret_of_launcher() != first
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_of_launcher()
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        secret_of_launcher()
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        secret_of_launcher()
    monkeypatch.delenv(SECRET_FILE)
    assert secret_of_launcher() == b""
