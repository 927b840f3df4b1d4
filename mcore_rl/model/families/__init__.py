"""One file a family; `FAMILIES` names them all."""

from mcore_rl.model.families import deepseek_v3, llama, mixtral, qwen3, qwen3_moe
from mcore_rl.model.family import Family

FAMILIES: dict[str, Family] = {
    "qwen3_moe": qwen3_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
}
