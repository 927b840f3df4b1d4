import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.errors import ConfigError
from mcore_rl.metrics.performance import known_peak_tflops, measured_peak_flops, peak_flops


@pytest.mark.parametrize(
    ("device_name", "bf16_tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", None),
        ("Some New GPU", None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_cuda_gives(device_name, bf16_tflops):
    assert known_peak_tflops(device_name, "bf16") == bf16_tflops


def test_the_configured_peak_wins_on_shared_cores_none_is_guessed_and_an_unknown_one_is_asked_for(monkeypatch):
    assert peak_flops(torch.device("cpu"), "fp32", configured_tflops=1.5) == 1.5e12
    assert peak_flops(torch.device("cpu"), "fp32", configured_tflops="auto") is None
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some New GPU")
    with pytest.raises(ConfigError, match=r"fp8 peak of Some New GPU is not known: set log\.peak_tflops"):
        peak_flops(torch.device("cuda"), "fp8", configured_tflops="auto")


def test_the_measured_peak_is_that_of_the_fastest_product(monkeypatch):
    with FlopCounterMode(display=False) as counter:
        torch.ones(1024, 1024) @ torch.ones(1024, 1024)
    flops = counter.get_total_flops()
    # A clock by which the products take 10 ms (that one warms up), 30, 20 and 50 ms.
    ticks_s = iter([0.0, 0.01, 0.1, 0.13, 0.2, 0.25, 0.3, 0.32, 0.35, 0.36, 0.41, 0.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks_s))
    assert measured_peak_flops(torch.device("cpu"), torch.float32) == pytest.approx(flops / 0.02)


def test_measuring_draws_nothing_from_the_generator_of_dropout():
    before = torch.get_rng_state()
    measured_peak_flops(torch.device("cpu"), torch.float32, budget_s=0.0)
    assert torch.equal(torch.get_rng_state(), before)
