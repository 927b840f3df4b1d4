"""The KL coefficient follows Ziegler's controller: numbers by hand, and a system that it brings to its target."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rl.models.reference import next_kl_coeff


@pytest.mark.parametrize(
    ("kl_nats", "power"),
    [
        (6.0, 0.0),  # on the target
        (6.6, 0.1 * 0.128),  # 10 % above it
        (5.7, -0.05 * 0.128),
        (60.0, 0.2 * 0.128),  # an error counts as 20 % at most
        (0.0, -0.2 * 0.128),
    ],
)
def test_the_coefficient_changes_by_the_relative_error_times_completions_over_the_horizon(kl_nats, power):
    got = next_kl_coeff(0.2, kl_nats, target=6.0, horizon=1000, num_completions=128)
    assert got == pytest.approx(0.2 * math.exp(power), rel=1e-12)
    # As the paper has it, up to the square of a step.
    assert got == pytest.approx(0.2 * (1 + power), rel=power**2)


@given(
    coeff=st.floats(1e-9, 1e3),
    kl_nats=st.floats(-1e3, 1e6),
    horizon=st.integers(1, 10**6),
    num_completions=st.integers(0, 10**9),
)
def test_the_coefficient_stays_positive_and_moves_towards_the_target(coeff, kl_nats, horizon, num_completions):
    got = next_kl_coeff(coeff, kl_nats, target=6.0, horizon=horizon, num_completions=num_completions)
    assert got > 0 and abs(math.log(got / coeff)) <= 0.2 + 1e-12
    assert (got >= coeff) if kl_nats >= 6.0 else (got <= coeff)


@pytest.mark.parametrize(("kl_nats", "power"), [(60.0, 0.2), (6.6, 0.1), (0.0, -0.2)])
@pytest.mark.parametrize("num_completions", [10, 4096, 10**9])
def test_a_batch_of_many_horizons_counts_as_one(kl_nats: float, power: float, num_completions: int) -> None:
    got = next_kl_coeff(0.2, kl_nats, target=6.0, horizon=10, num_completions=num_completions)
    assert got == pytest.approx(0.2 * math.exp(power), rel=1e-12)


@pytest.mark.parametrize(("kl_nats", "factor"), [(60.0, math.exp(0.2)), (0.0, math.exp(-0.2))])
def test_a_coefficient_at_the_end_of_float32_s_range_stays_a_number_and_comes_back(kl_nats, factor) -> None:
    coeff, other = 0.2, 60.0 - kl_nats
    for _ in range(5000):
        coeff = next_kl_coeff(coeff, kl_nats, target=6.0, horizon=1, num_completions=4096)
    assert 0 < float(torch.tensor(coeff, dtype=torch.float32)) < math.inf
    assert next_kl_coeff(coeff, other, target=6.0, horizon=1, num_completions=1) == pytest.approx(coeff / factor)


def test_a_kl_that_falls_with_its_coefficient_comes_to_its_target() -> None:
    coeff = 1.0
    for _ in range(400):
        coeff = next_kl_coeff(coeff, 1.5 / coeff, target=6.0, horizon=10000, num_completions=512)
    assert 1.5 / coeff == pytest.approx(6.0, rel=1e-2)
