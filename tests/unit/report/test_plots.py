import struct

import numpy as np
import pytest
import torch

from mcore_rl.config.run import LogConfig
from mcore_rl.errors import DataError
from mcore_rl.obs.jsonl import FILE_NAME, JsonlSink, read_records
from mcore_rl.obs.metrics import Metric
from mcore_rl.obs.sinks import Log
from mcore_rl.report.plots import curve, last_loads, plot_run


def tell(run_dir, *, with_experts):
    log = Log([JsonlSink(run_dir / FILE_NAME, 0)], LogConfig(matrix_interval=2))
    log.write_now(0, [Metric("data/unigram_nats", 5.0)])
    for step in range(1, 5):
        metrics = [
            Metric("train/loss_nats", 6.0 - step),
            Metric("train/lr", 0.1),
            Metric("train/grad_norm", 1.0),
        ]
        if with_experts:
            metrics += [
                Metric("moe/load_max_over_mean", 1.5),
                Metric("moe/layer_01/load_max_over_mean", 1.5),
                Metric("moe/expert_load", torch.tensor([[0, 0], [step, 3 * step]])),
                Metric("mtp/expert_load", torch.tensor([[8, 8]])),
            ]
        log.write(step, metrics)
    log.write_now(4, [Metric("eval/loss_nats", 2.5)])
    log.close()


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def test_a_dense_run_has_one_row_of_pictures_and_an_moe_two(tmp_path):
    heights = {}
    for with_experts in (False, True):
        run_dir = tmp_path / str(with_experts)
        run_dir.mkdir()
        tell(run_dir, with_experts=with_experts)
        _, heights[with_experts] = png_size(plot_run(run_dir))
    assert heights[True] > 1.8 * heights[False]


def test_the_heat_map_shows_load_over_the_layers_mean_and_leaves_dense_layers_out(tmp_path):
    tell(tmp_path, with_experts=True)
    title, labels, load_LE = last_loads(list(read_records(tmp_path / FILE_NAME)))
    assert (title, labels) == ("up to step 4", ["0", "1", "mtp 0"])
    np.testing.assert_array_equal(load_LE, [[np.nan, np.nan], [0.5, 1.5], [1, 1]])


def test_a_curve_leaves_out_what_is_not_finite():
    steps, values = curve(
        [{"step": 1, "x": 2}, {"step": 2, "x": "nan"}, {"step": 3}, {"step": 4, "x": 1.5}], "x"
    )
    assert (steps.tolist(), values.tolist()) == ([1, 4], [2, 1.5])


def test_a_run_without_a_step_is_an_error(tmp_path):
    (tmp_path / FILE_NAME).write_text('{"step": 0, "event": "started"}\n')
    with pytest.raises(DataError, match="holds no loss yet"):
        plot_run(tmp_path)
