import json
import math
import os
import signal

import pytest

from mcore_rl.errors import DataError
from mcore_rl.metrics.jsonl import JsonlSink, NewRecords, keep_until, read_records


def untimed(path):
    return [{k: v for k, v in record.items() if k != "time"} for record in read_records(path)]


def write_steps(path, first, last, resume_step):
    sink = JsonlSink(path, resume_step)
    for step in range(first, last + 1):
        sink.write(step, {"train/loss_nats": 1 / step})
        if step % 5 == 0:
            sink.message(step, "checkpoint saved", {"path": f"step_{step}"})
    sink.close()


def test_a_resumed_log_equals_that_of_a_run_without_interruption(tmp_path):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_steps(whole, 1, 12, resume_step=0)
    write_steps(resumed, 1, 8, resume_step=0)  # saved at 5, killed after 8
    write_steps(resumed, 6, 12, resume_step=5)
    assert untimed(resumed) == untimed(whole)


def test_a_start_from_nothing_drops_the_steps_of_an_earlier_attempt(tmp_path):
    write_steps(tmp_path / "m.jsonl", 1, 3, resume_step=0)
    write_steps(tmp_path / "m.jsonl", 1, 1, resume_step=0)
    assert untimed(tmp_path / "m.jsonl") == [{"step": 1, "train/loss_nats": 1.0}]


def test_a_file_that_is_deleted_or_moved_while_the_run_writes_is_begun_anew_and_says_so(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path, 0)
    gone = "metrics.jsonl was deleted or moved: the records before are not here"
    for step, remove in ((1, lambda: None), (2, path.unlink), (3, lambda: path.rename(tmp_path / "moved.jsonl"))):
        remove()
        sink.write(step, {"train/loss_nats": 1 / step})
        event = [{"step": step, "event": gone}] if step > 1 else []
        assert untimed(path) == [*event, {"step": step, "train/loss_nats": 1 / step}]
        warning = f"warning: {path} was deleted or moved: a new one begins at step {step}\n"
        assert capsys.readouterr().err == (warning if step > 1 else "")
    sink.close()


@pytest.mark.parametrize("torn", [b'{"step": 3, "train/lo', b'{"step": 3', b"\x00\x00\x00", b'"step"'])
def test_a_torn_last_line_is_removed_and_reported(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    JsonlSink(path, 5).close()
    event = {"step": 5, "event": "torn lines removed from metrics.jsonl", "lines": 1}
    assert untimed(path) == [{"step": 1}, {"step": 2}, event]


def test_a_last_line_without_its_newline_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    write_steps(path, 3, 3, resume_step=2)
    assert [record["step"] for record in untimed(path)] == [1, 2, 3]


def test_what_is_kept_is_kept_byte_for_byte(tmp_path):
    path = tmp_path / "m.jsonl"
    kept = b'{"step": 1, "time": 1.5, "x": 0.10000000000000001}\n{"step": 2}\n'
    path.write_bytes(kept + b'{"step": 3}\n')
    assert keep_until(path, 2) == 0
    assert path.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [path]


def test_a_step_is_on_disk_when_the_process_is_killed_right_after(tmp_path):
    path = tmp_path / "m.jsonl"
    if (child := os.fork()) == 0:
        sink = JsonlSink(path, 0)
        sink.write(1, {"train/loss_nats": 2.5})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert untimed(path) == [{"step": 1, "train/loss_nats": 2.5}]


def test_numbers_are_read_back_bit_for_bit_also_those_that_are_not_finite_and_stay_valid_json(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path, 0)
    values = {"train/loss_nats": math.nan, "train/grad_norm": math.inf, "moe/expert_load": [[1.0, -math.inf]]}
    sink.write(1, values | {"train/lr": math.pi * 1e-7})
    sink.close()
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert math.isnan(float(record["train/loss_nats"])) and record["train/lr"] == math.pi * 1e-7
    assert float(record["train/grad_norm"]) == math.inf
    assert float(record["moe/expert_load"][0][1]) == -math.inf


def test_a_folder_without_metrics_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl is not there"):
        list(read_records(tmp_path / "metrics.jsonl"))


def test_new_records_are_taken_once_when_they_are_whole_also_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "time": 2.0}\n')
    news = NewRecords(path)

    def taken():
        return [record["step"] for record in news.take()]

    assert taken() == []
    sink = JsonlSink(path, 1)  # it resumes at step 1, and begins the file anew
    assert taken() == []
    sink.write(2, {"train/lr": 0.5})
    with path.open("a") as file:
        file.write('{"step": 3, "time": 9e9')
        file.flush()
        assert taken() == [2]
        file.write("}\n")
        file.flush()
    assert taken() == [3] and taken() == []
    path.unlink()
    assert taken() == []
