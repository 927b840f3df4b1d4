"""The KL coefficient follows Ziegler's controller: numbers by hand, and a system that it brings to its target."""

import pytest

from mcore_rl.rl.objectives.kl_control import next_kl_coeff


@pytest.mark.parametrize(
    ("kl_nats", "wanted"),
    [
        (6.0, 0.2),  # on the target
        (6.6, 0.2 * (1 + 0.1 * 0.128)),  # 10 % above it
        (5.7, 0.2 * (1 - 0.05 * 0.128)),
        (60.0, 0.2 * (1 + 0.2 * 0.128)),  # an error counts as 20 % at most
        (0.0, 0.2 * (1 - 0.2 * 0.128)),
    ],
)
def test_the_coefficient_changes_by_the_relative_error_times_completions_over_the_horizon(
    kl_nats: float, wanted: float
) -> None:
    got = next_kl_coeff(0.2, kl_nats, target=6.0, horizon=1000, num_completions=128)
    assert got == pytest.approx(wanted, rel=1e-12)


def test_a_kl_that_falls_with_its_coefficient_comes_to_its_target() -> None:
    coeff = 1.0
    for _ in range(400):
        coeff = next_kl_coeff(coeff, 1.5 / coeff, target=6.0, horizon=10000, num_completions=512)
    assert 1.5 / coeff == pytest.approx(6.0, rel=1e-2)
