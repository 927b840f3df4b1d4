import io
import math
import re
import sys

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.config.extension import optional_package
from mcore_rl.config.run import LogConfig
from mcore_rl.errors import ConfigError
from mcore_rl.metrics.jsonl import JsonlSink, read_records
from mcore_rl.metrics.metrics import Metric
from mcore_rl.metrics.sinks import ConsoleSink, Log, open_log, silent_log


def jsonl_log(path, step=0, **settings):
    return Log([JsonlSink(path, step)], LogConfig(**settings), step)


def records(path):
    return [{k: v for k, v in record.items() if k != "time"} for record in read_records(path)]


def test_a_line_tells_of_all_steps_since_the_last_one(tmp_path):
    log = jsonl_log(tmp_path / "m", interval=3)
    for step in range(1, 7):
        log.write(step, [Metric("train/loss_nats", 10.0 * step, 10), Metric("train/lr", step)])
    log.close()
    assert records(tmp_path / "m") == [
        {"step": 3, "train/loss_nats": 2, "train/lr": 3},
        {"step": 6, "train/loss_nats": 5, "train/lr": 6},
    ]


@pytest.mark.parametrize("killed_after", [5, 6, 8])
def test_sums_over_steps_survive_a_kill_when_checkpoints_flush_them(tmp_path, killed_after):
    """A checkpoint at steps 5 and 10; the log that is killed is not closed, and the next one starts at step 5."""

    def run(name, first, last):
        log = jsonl_log(tmp_path / name, first - 1, interval=4, matrix_interval=10)
        for step in range(first, last + 1):
            log.write(step, [Metric("moe/expert_load", torch.tensor([[1, step]])), Metric("train/lr", step)])
            if step % 5 == 0:
                log.flush(step, [Metric("moe/dropped_tokens", 1)])

    run("straight", 1, 10)
    run("killed", 1, killed_after)
    run("killed", 6, 10)
    assert records(tmp_path / "killed") == records(tmp_path / "straight")
    loads = [record["moe/expert_load"] for record in records(tmp_path / "killed") if "moe/expert_load" in record]
    assert loads == [[[5, 15]], [[5, 40]]]


def test_an_evaluation_does_not_wait_for_the_interval_and_what_is_pending_is_written_at_the_end(tmp_path):
    log = jsonl_log(tmp_path / "m", interval=10)
    log.write(4, [Metric("train/lr", 1.5)])
    log.write_now(4, [Metric("eval/loss_nats", 6.0, 2)])
    assert records(tmp_path / "m") == [{"step": 4, "eval/loss_nats": 3}]
    log.close()
    assert records(tmp_path / "m")[1:] == [{"step": 4, "train/lr": 1.5}]


@pytest.mark.parametrize(
    ("matrix_interval", "logged"), [(2, {2: [[2, 4]], 4: [[2, 4]]}), (None, {}), (3, {3: [[3, 6]], 4: [[1, 2]]})]
)
def test_matrices_have_their_own_interval_and_lose_nothing(tmp_path, matrix_interval, logged):
    log = jsonl_log(tmp_path / "m", matrix_interval=matrix_interval)
    for step in range(1, 5):
        log.write(step, [Metric("train/lr", 1.0), Metric("moe/expert_load", torch.tensor([[1, 2]]))])
    log.close()
    matrices = {r["step"]: r["moe/expert_load"] for r in records(tmp_path / "m") if "moe/expert_load" in r}
    assert matrices == logged


def test_an_event_is_a_record_of_the_current_step(tmp_path):
    log = jsonl_log(tmp_path / "m", step=7)
    log.message("resumed", path="step_7")
    log.write(8, [])
    log.message("step skipped: gradient not finite")
    assert records(tmp_path / "m") == [
        {"step": 7, "event": "resumed", "path": "step_7"},
        {"step": 8, "event": "step skipped: gradient not finite"},
    ]


def test_a_silent_log_takes_everything_and_tells_nobody(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = silent_log()
    log.write(1, [Metric("train/lr", 1.0)])
    log.write_now(1, [Metric("train/lr", 1.0)])
    log.message("nothing")
    log.close()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def console_text(width=80):
    text = io.StringIO()
    return text, ConsoleSink(Console(file=text, width=width), total_steps=2000)


def test_the_console_shows_details_with_verbose_alone_and_warnings_with_quiet(tmp_path):
    shown = {}
    for level in ("quiet", "normal", "verbose"):
        text = io.StringIO()
        sink = ConsoleSink(Console(file=text), 2, is_quiet=level == "quiet")
        path = tmp_path / level
        log = Log([sink, JsonlSink(path, 0)], LogConfig(console=level))
        log.detail("2 x CPU")
        log.message("3 prompts")
        log.message("warning: no signal")
        log.message("Warning: text is not read")
        log.write(1, [Metric("train/loss_nats", 3.0)])
        log.close()
        shown[level] = text.getvalue().splitlines()
        events = [record["event"] for record in records(path) if "event" in record]
        assert events == ["2 x CPU", "3 prompts", "warning: no signal", "Warning: text is not read"]
    warnings = ["warning: no signal", "Warning: text is not read"]
    step = "step 1/2 | loss 3.0000"
    assert shown == {
        "quiet": warnings,
        "normal": ["3 prompts", *warnings, step],
        "verbose": ["2 x CPU", "3 prompts", *warnings, step],
    }


def test_a_message_shows_control_characters_escaped_and_the_file_has_them(tmp_path):
    text, sink = console_text()
    log = Log([sink, JsonlSink(tmp_path / "m", 0)], LogConfig())
    log.message("wrote \x1b[2J", path="\x1b]0;title\x07")
    assert text.getvalue() == "wrote \\x1b[2J | path \\x1b]0;title\\x07\n"
    assert records(tmp_path / "m")[0]["event"] == "wrote \x1b[2J"


def test_a_step_is_one_plain_line_when_the_output_is_not_a_terminal():
    text, sink = console_text(width=20)
    sink.write(
        120,
        {
            "moe/load_max_over_mean": 1.418,
            "train/grad_norm": 0.71249,
            "train/loss_nats": 3.42134,
            "train/lr": 0.0003,
            "train/mfu": 0.3119,
            "train/tokens_per_s_per_rank": 12345.6,
            "moe/expert_load": [[1, 2]],
        },
    )
    assert text.getvalue() == (
        "step  120/2000 | loss 3.4213 | lr 3.00e-04 | grad norm 0.712 | tokens/s/rank 12.3k | MFU 31.2% | "
        "load max/mean 1.42\n"
    )


def test_on_a_terminal_steps_are_rows_of_a_table_as_wide_as_it_with_a_header_every_20_rows():
    text = io.StringIO()
    sink = ConsoleSink(Console(file=text, width=49), total_steps=300, has_columns=True)
    for step in range(1, 42):
        values = {"train/loss_nats": 3.42134, "train/lr": 3e-4, "train/grad_norm": 0.71249, "train/mfu": 0.3119}
        sink.write(step, values | ({"mtp/loss_nats": 12.5} if step == 41 else {}))
    sink.write(41, {"eval/loss_nats": 3.5})
    header, row, *rest = text.getvalue().splitlines()
    # MFU would end in column 50.
    assert header == "   step     left    loss        lr  grad norm"
    assert row == "  1/300           3.4213  3.00e-04      0.712"
    assert re.fullmatch(r"  2/300  0:00:\d\d  3\.4213  3\.00e-04      0\.712", rest[0])
    lines = [header, row, *rest]
    assert [at for at, line in enumerate(lines) if "step" in line and "/" not in line] == [0, 21, 42]
    assert lines[-3:] == [
        "   step     left    loss  mtp loss        lr",
        f" 41/300  {lines[-2][9:16]}  3.4213   12.5000  3.00e-04",
        "step  41/300 | eval loss 3.5000",
    ]


@pytest.mark.parametrize(
    ("num_without_signal", "norm", "cells"),
    [
        (8.0, 0.0, "no signal in 8 of 8 groups"),
        (8.0, 0.0123, "no signal in 8 of 8 groups | grad norm 0.012"),  # of another term of the loss
        (7.0, 0.0, "grad norm 0.000"),
        (7.0, 0.25, "grad norm 0.250"),
    ],
)
def test_updates_whose_groups_all_lack_a_signal_say_so(num_without_signal, norm, cells):
    text, sink = console_text()
    groups = {"policy/groups": 8.0, "policy/groups_without_signal": num_without_signal}
    sink.write(4, {"reward/mean": 1.0, "train/lr": 1e-5, "train/grad_norm": norm, **groups})
    assert text.getvalue() == f"step    4/2000 | reward 1.000 | lr 1.00e-05 | {cells}\n"


def test_time_left_follows_the_pace_of_the_steps(monkeypatch):
    clock_s = iter([100.0, 104.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock_s))
    text, sink = console_text()
    sink.write(10, {"train/lr": 1e-3})
    sink.write(12, {"train/lr": 1e-3})  # 2 s a step, 1988 steps to go
    assert text.getvalue().splitlines()[1] == "step   12/2000 | lr 1.00e-03 | 1:06:16 left"


def test_brackets_in_an_event_are_text_and_a_loss_that_is_not_finite_is_shown_as_it_is():
    text, sink = console_text()
    sink.message(3, "unknown key [bold]", {"path": "a[0]"})
    sink.write(4, {"train/loss_nats": math.nan, "train/grad_norm": math.inf})
    shown = ["unknown key [bold] | path a[0]", "step    4/2000 | loss nan | grad norm inf"]
    assert text.getvalue().splitlines() == shown


def test_tensorboard_shows_steps_that_ran_again_once(tmp_path, capsys):
    for resume_step, steps in ((0, range(1, 6)), (3, range(4, 7))):
        log = open_log(tmp_path, LogConfig(sinks=("jsonl", "tensorboard")), resume_step, total_steps=6)
        for step in steps:
            log.write(step, [Metric("train/loss_nats", step + resume_step / 10)])
        log.message("saved")
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(e.step, pytest.approx(e.value)) for e in events.Scalars("train/loss_nats")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.3), (5, 5.3), (6, 6.3)]
    assert [record.get("train/loss_nats") for record in records(tmp_path / "metrics.jsonl")] == [
        1, 2, 3, 4.3, 5.3, 6.3, None,
    ]  # fmt: skip


def test_a_sink_whose_package_is_missing_is_a_config_error_with_a_remedy():
    with pytest.raises(ConfigError, match=r"log\.x = true needs `pip install there-is-none`; install it or unset"):
        optional_package("there_is_none_such", "log.x = true", "there-is-none")


OWN_SINKS = """
class Short:
    def __init__(self, run):
        self.file = (run.run_dir / f"{type(self).__name__}.txt").open("a")
        print(run.name, run.project, run.tags, run.resume_step, run.settings, file=self.file)
    def write(self, step, values):
        print(step, values, file=self.file)
    def message(self, step, text, fields):
        print(step, text, fields, file=self.file)
    def close(self):
        self.file.close()

class Whole(Short):
    def samples(self, step, rows):
        print(step, len(rows), rows[0], file=self.file)
"""


def test_sinks_of_the_users_own_get_metrics_events_and_samples(tmp_path, monkeypatch):
    (tmp_path / "own_sinks_of_a_test.py").write_text(OWN_SINKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ("own_sinks_of_a_test:Short", "own_sinks_of_a_test:Whole")
    config = LogConfig(sinks=names, project="mine", tags=("a", "b"))
    log = open_log(tmp_path / "run", config, 2, 4, {"lr": 0.5})
    log.write(3, [Metric("train/loss_nats", 6.0, 2)])
    log.message("saved", path="iter_3")
    log.samples([{"prompt": str(index), "completion": ""} for index in range(100)])
    log.close()
    head = "run mine ('a', 'b') 2 {'lr': 0.5}\n3 {'train/loss_nats': 3}\n3 saved {'path': 'iter_3'}\n"
    assert (tmp_path / "run/Short.txt").read_text() == head
    assert (tmp_path / "run/Whole.txt").read_text() == f"{head}3 64 {{'prompt': '0', 'completion': ''}}\n"
    # The file that the report reads is written in any case.
    assert [record["step"] for record in records(tmp_path / "run/metrics.jsonl")] == [3, 3]
    with pytest.raises(ConfigError, match=r'log.sinks names "own_sinks_of_a_test:None_such", but'):
        open_log(tmp_path / "run", LogConfig(sinks=("own_sinks_of_a_test:None_such",)), 2, 4)
