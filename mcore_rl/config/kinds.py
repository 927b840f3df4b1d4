"""The kinds of config files, named after the programs that read them."""

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.pipeline import PipelineConfig, StudyConfig
from mcore_rl.config.preferences import DPOConfig, RewardModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.section import Section
from mcore_rl.config.sft import SFTConfig

KINDS: dict[str, type[Section]] = {
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "rm": RewardModelConfig,
    "dpo": DPOConfig,
    "rl": RlRunConfig,
    "study": StudyConfig,
    "pipeline": PipelineConfig,
    "cluster": ClusterConfig,
}
READERS = {kind: f"`mcore-rl {kind}`" for kind in KINDS}
READERS |= {"pipeline": "`mcore-rl launch`", "cluster": "`mcore-rl launch ... --cluster`"}
"""Kind -> the command that takes such a config."""
ONE_PASS = "it makes one pass over a batch, with which no other is compared, so that there are no routes to replay."
NO_REPLAY = {
    "pretrain": ONE_PASS,
    "sft": ONE_PASS,
    "rm": ONE_PASS,
    "dpo": "it makes one update of a batch. The reference's logprobs are computed once before all updates, with other "
    "weights: their routes imposed for a whole run would train a model that is never used so.",
}
"""Kind without routing replay -> the reason."""
OTHER_NAMES = {"grpo": "rl", "gspo": "rl"}
"""First word of a file's name -> its kind, where the two differ."""


def kind_of_name(name: str) -> str | None:
    """Return the kind that a file's first word stands for, as "rl" for rl_long.toml; None if it is no kind."""
    word = name.replace("_", ".").replace("-", ".").partition(".")[0]
    word = OTHER_NAMES.get(word, word)
    return word if word in KINDS else None


def kind_of_config(config: Section) -> str:
    """Return the name in KINDS of a config, such as "pretrain"."""
    return next(kind for kind, cls in KINDS.items() if type(config) is cls)
