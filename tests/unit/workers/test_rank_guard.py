import pytest

from mcore_rl.errors import DataError
from mcore_rl.workers.rank_guard import rank_guard


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def test_what_the_user_can_mend_is_said_without_traceback_and_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as raised, rank_guard():
        raise DataError("no such file")
    assert raised.value.code == 2
    assert capsys.readouterr().err == "DataError: no such file\n"


def test_any_other_error_of_a_rank_that_is_alone_keeps_its_traceback():
    with pytest.raises(ValueError, match="boom"), rank_guard():
        raise ValueError("boom")
