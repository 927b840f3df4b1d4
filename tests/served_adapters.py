"""Low-rank adapters in the weights of a server, by hand: W + (lora_alpha / r) B A, with one scale for all modules."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def with_adapter(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Hugging Face's tensors with the adapter in a folder of peft, as servers read one: patterns are not."""
    config = json.loads((folder / "adapter_config.json").read_text())
    parts = load_file(folder / "adapter_model.safetensors")
    assert config["r"] >= max(part.shape[0] for name, part in parts.items() if "lora_A" in name)
    found = dict(tensors)
    for name, weight_b in parts.items():
        if "lora_B" not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        assert module.rpartition(".")[2] in config["target_modules"]
        product = weight_b @ parts[name.replace("lora_B", "lora_A")]
        found[f"{module}.weight"] = tensors[f"{module}.weight"] + config["lora_alpha"] / config["r"] * product
    return found
