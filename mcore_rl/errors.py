"""The errors that are the user's to mend. Each message says what it got, what it wanted, and what to do."""

HUNG_STATUS = 75
"""Exit status of a rank that ended because no step finished in train.hang_s."""


class McoreRlError(Exception):
    """Base of the errors below: printed without a traceback, exit status 2."""


class ConfigError(McoreRlError):
    """A setting that is unknown, of the wrong type, or at odds with another."""


class DataError(McoreRlError):
    """Training data or a tokenizer that is missing, corrupt, or does not fit."""


class CheckpointError(McoreRlError):
    """A checkpoint that is missing, incomplete, foreign, or could not be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are missing, cut off, or not those that were written."""


class TrainingError(McoreRlError):
    """A run that cannot go on, such as one whose gradients stay infinite."""


class EngineError(McoreRlError):
    """A rollout engine that failed."""


class RoutingError(McoreRlError):
    """Routes of a replay that are missing, twice there, damaged, or not the ones that routers took."""
