"""The step of `make gpu` that compares the kernels with torch, on small shapes. No figure of it is a measurement."""

from bench.gpu import steps


def test_the_step_compares_every_kernel_with_torch() -> None:
    outcome = steps.triton(steps.Machine(is_gpu=False, mesh=None))  # type: ignore[arg-type]
    assert list(outcome.figures) == ["logprobs", "routing", "experts"] and "logprobs" in outcome.summary
    for found in outcome.figures.values():
        # In float32 here: the order of the sums alone differs.
        assert max(found["differences"].values()) < 1e-4
        assert found["triton"]["seconds"] > 0 and found["torch"]["seconds"] > 0
