from mcore_rl.metrics.metric_table import METRICS
from tests.emitted import EMITTED_BY, ONLY_ON_CUDA, rows_of


def test_every_metric_of_the_table_is_emitted_by_a_test_run_or_needs_cuda():
    emitted = set.union(*(rows_of(run) for run in EMITTED_BY))
    missing = sorted(set(METRICS) - emitted - set(ONLY_ON_CUDA))
    assert not missing, f"add {missing} to a run of tests/emitted.py, or delete the rows that nothing emits"
    assert set(ONLY_ON_CUDA) <= set(METRICS) - emitted
