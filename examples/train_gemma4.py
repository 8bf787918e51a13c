"""Fine-tunes a small random Gemma 4 with train_hf.py, which must be in the same folder. The training uses packed
documents, gradient checkpointing and the model's own scheme. The model has heads of 512 channels in global layers and
of 256 in local layers, like the released models. Its last layers read the keys of earlier layers, like E2B and E4B.

    python train_gemma4.py --device cpu --dtype float32 --steps 20 --batch 2
    python train_gemma4.py --model MY_GEMMA4 --text my_texts/ --length 8192  # a folder saved by Gemma4ForCausalLM

The options are the same as in train_hf.py. The attention of every layer runs in fused kernels, forward and backward, on
the CPU too. Under torch.use_deterministic_algorithms(True) the gradients are bitwise reproducible. The script was not
run on a GPU.
"""

import sys

import train_hf
from transformers import Gemma4TextConfig

train_hf.TINY = Gemma4TextConfig(
    vocab_size=train_hf.BYTES,
    vocab_size_per_layer_input=train_hf.BYTES,
    hidden_size=64,
    hidden_size_per_layer_input=16,
    intermediate_size=128,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=256,
    global_head_dim=512,
    sliding_window=32,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
)


def main(arguments: list[str] | None = None) -> int:
    return train_hf.main(["--scheme", "own", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
