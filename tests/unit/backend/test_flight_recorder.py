import os

import pytest

from mcore_rl.backend.failures import FAILURES
from mcore_rl.backend.flight_recorder import ENTRIES, arm, dump

NAMES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (*NAMES, FAILURES):
        monkeypatch.setenv(name, "")  # so that what `arm` sets is taken back
        monkeypatch.delenv(name)


def test_the_record_goes_beside_the_logs_of_the_attempt_and_the_users_settings_stay(tmp_path, monkeypatch):
    arm()
    assert not any(name in os.environ for name in NAMES), "nobody collects"
    monkeypatch.setenv(FAILURES, str(tmp_path / "logs/12.0/failures"))
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    arm()
    assert [os.environ[name] for name in NAMES] == ["7", "1", f"{tmp_path}/logs/12.0/nccl_trace_rank_"]
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE")
    arm()
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == str(ENTRIES)


def test_without_nccl_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(FAILURES, str(tmp_path / "failures"))
    arm()
    assert dump(0) == "" and not list(tmp_path.iterdir())
