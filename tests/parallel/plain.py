"""The matrices of numerics run with torch's layers, which GPUs have too; tests/unit/model/layers/test_cpu.py holds the
compiled layers of CPUs to them.
"""

from mcore_rl.config.run import RunConfig
from mcore_rl.megatron.platform import start
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState


def set_up_plain(config: RunConfig) -> TrainState:
    """Return `set_up` of a config that asks for torch's layers."""
    platform = start(config.platform)
    assert platform.layers == "torch", 'platform.layers="torch" is missing'
    return set_up(config, platform)
