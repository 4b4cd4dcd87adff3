"""Makes the models of the stock vLLM leg: `python scripts/vllm_models.py OUT SMOLLM2`, run by the leg's own Python.

    OUT/random   Qwen3, 2 layers, random from a fixed seed, head_dim 32: broken UTF-8 in most replies
    OUT/dying    the same with head_dim 16, which vLLM's CPU attention takes and then dies of at the first request

`SMOLLM2` is the directory that `export_hf.py` made: its tokenizer is used for both. Needs torch and transformers.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parent.parent / "tests" / "vllm" / "chat_template.jinja"
SEED = 20


def make(out: Path, tokenizer: Path, head_dim: int) -> None:
    """On return the model directory is complete."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=8192,
        initializer_range=0.4,  # with the usual 0.02 every next token is equally likely
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python scripts/vllm_models.py <out> <smollm2 directory>")
    root, smollm2 = Path(sys.argv[1]), Path(sys.argv[2])
    make(root / "random", smollm2, head_dim=32)
    make(root / "dying", smollm2, head_dim=16)
