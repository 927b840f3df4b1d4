"""Write the checkpoint beside this file by an older Megatron-Core, which is no dependence of this project:

pip install --no-deps --target /tmp/megatron 'megatron-core==0.15.3'
PYTHONPATH=/tmp/megatron python tests/golden/megatron_core_0.15/write.py FOLDER
"""

import os
import sys
import zlib
from argparse import Namespace
from pathlib import Path

import torch


def main() -> None:
    """Save a tiny Llama as Megatron-LM's `save_checkpoint` saves it, without an optimizer."""
    # Megatron asks for a GPU, whatever the device.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")

    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=1,
        ffn_hidden_size=24,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, 32, 64, share_embeddings_and_output_weights=False, position_embedding_type="rope")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Small whole numbers, which a test computes by the name.
            values = torch.arange(weight.numel()) % 251 - zlib.crc32(name.encode()) % 100
            weight.copy_(values.view(weight.shape))
    state = {
        "args": Namespace(num_layers=2, hidden_size=16),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(),
    }
    Path(sys.argv[1]).mkdir()
    dist_checkpointing.save(state, sys.argv[1])


# Megatron's writers are processes, which import this file.
if __name__ == "__main__":
    main()
