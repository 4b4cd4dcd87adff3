"""Writes the embedded engine's weights as a Hugging Face model directory: config, float32 safetensors, our tokenizer.

Run: `python scripts/export_hf.py out/` (540 MB). For checking the engine against another implementation, and for
serving the same weights with another engine. The tokenizer is the engine's own: the one that transformers makes from
the GGUF splits digits and white space differently. Needs `safetensors` (development only).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from toprope.servers.model.engines.embedded.gguf import GgufFile
from toprope.servers.model.engines.embedded.tokenizer import Vocabulary
from toprope.servers.model.engines.embedded.weights import MODEL, find_weights, half_split, open_weights, read_shape

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of a layer's tensors, and transformers' (`modeling_llama.py`)."""


def state(file: GgufFile) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor under transformers' name, float32, matrices (out, in)."""
    shape = read_shape(file)
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    tensors = {
        "model.embed_tokens.weight": file.tensor("token_embd.weight"),
        "model.norm.weight": file.tensor("output_norm.weight"),
    }
    for index in range(shape.layers):
        for theirs, ours in NAMES.items():
            tensor = file.tensor(f"blk.{index}.{theirs}.weight")
            if theirs in heads:
                tensor = half_split(tensor, heads[theirs])
            tensors[f"model.layers.{index}.{ours}.weight"] = np.ascontiguousarray(tensor)
    return tensors


def config(file: GgufFile) -> dict[str, Any]:
    """`config.json` of a Llama model with these sizes."""
    shape = read_shape(file)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_base,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": file.keys["tokenizer.ggml.bos_token_id"],
        "eos_token_id": file.keys["tokenizer.ggml.eos_token_id"],
    }


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """`tokenizer_config.json`: no BOS, the model's own chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": file.keys["tokenizer.chat_template"],
    }


def export(out: Path, weights: Path | None = None) -> None:
    """The directory is complete on return; files of the same names are replaced."""
    from safetensors.numpy import save_file

    file = open_weights(find_weights(MODEL, weights))
    out.mkdir(parents=True, exist_ok=True)
    save_file(state(file), str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(file), indent=2))
    (out / "tokenizer.json").write_text(Vocabulary(file).definition)
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(file), indent=2))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/export_hf.py <directory>")
    export(Path(sys.argv[1]))
