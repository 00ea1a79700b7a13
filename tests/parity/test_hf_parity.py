"""Forward and backward pass against transformers, for each family, on random tiny configs in float64."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import ModelConfig, Plan
from colonnade.model import Rows
from tests.hf import documents, fail_to_write, load, load_and_save, stream_of
from tests.hf_configs import configs
from tests.hf_reference import TOLERANCE, random_model, same_as_transformers, transformers_logits
from tests.models import build
from tests.worlds import assert_same, run

LLAMA = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 41, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": 101, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "n_inner": 50,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-biases-wide-heads": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10,
        "num_key_value_heads": 1, "hidden_act": "gelu",
    },
    "llama-linear": {
        "model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
    },
    "llama-llama3": {
        "model_type": "llama", "head_dim": 16, "num_key_value_heads": 6,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 10000.0,
        },
    },
    "llama-yarn": {"model_type": "llama", "head_dim": 16, "rope_parameters": YARN},
    "llama-yarn-unrounded": {
        "model_type": "llama", "head_dim": 16,
        "rope_parameters": {**YARN, "truncate": False, "beta_fast": 2.5, "beta_slow": 0.5, "attention_factor": 0.9},
    },
    "llama-yarn-mscale": {
        "model_type": "llama", "head_dim": 16, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 5},
    "mistral-full": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-upper-window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 10, "attention_bias": True, "rms_norm_eps": 1e-6},
    "qwen3-window": {
        "model_type": "qwen3", "head_dim": 6, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-untied-relu": {"model_type": "gpt2", "tie_word_embeddings": False, "activation_function": "relu"},
    "gpt2-four-heads": {"model_type": "gpt2", "n_head": 4},
    "gpt2-default-inner": {"model_type": "gpt2", "n_inner": None, "activation_function": "gelu"},
    "llama-bidirectional": {"model_type": "llama", "is_causal": False},
    "mistral-bidirectional": {"model_type": "mistral", "is_causal": False, "sliding_window": None},
    "qwen2-bidirectional": {"model_type": "qwen2", "is_causal": False, "rope_parameters": YARN},
    "qwen3-bidirectional": {"model_type": "qwen3", "is_causal": False, "head_dim": 8},
    "gpt2-bidirectional": {"model_type": "gpt2", "is_causal": False},
}  # fmt: skip


def reference(case: str) -> Any:
    settings = dict(CASES[case])
    kind = settings.pop("model_type")
    return random_model(kind, (GPT2 if kind == "gpt2" else LLAMA) | settings, seed=len(case))


@pytest.mark.sample(7)
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    same_as_transformers(load(tmp_path / "hf"), theirs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "tp", "dp"),
    [
        ("llama-llama3", 2, 1),
        ("llama-llama3", 3, 1),
        ("llama-llama3", 2, 2),
        ("gpt2-four-heads", 2, 1),
        ("gpt2", 3, 1),
        ("mistral-window", 3, 1),
        ("qwen2", 1, 2),
        ("qwen2", 3, 1),
        ("qwen3", 3, 1),
        ("llama-bidirectional", 3, 1),
    ],
)
def test_any_layout_loads_and_saves_the_same_model(case: str, tp: int, dp: int, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    plan = Plan(tp=tp, dp=dp)
    results = run(plan.world, load_and_save, tmp_path / "hf", plan, tmp_path / "out")  # with dp, FSDP holds the weights
    expected = transformers_logits(theirs, documents(theirs.config.vocab_size))
    for logits in results:
        assert_same(logits, expected, TOLERANCE, "logits")

    assert (tmp_path / "out" / "model.safetensors.index.json").is_file(), "4,000-byte shards make more than one file"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert back.dtype == torch.float64
    assert getattr(back.config, "is_causal", True) == ("bidirectional" not in case)
    weights, original = back.state_dict(), theirs.state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in weights)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(), seed=st.integers(0, 99))
def test_saved_models_are_the_same_in_transformers(config: ModelConfig, seed: int) -> None:
    ours = build(config, seed=seed)
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(0.2 / config.init_std if p.dim() > 1 else 1.0)
    with tempfile.TemporaryDirectory() as place:
        write_hf(ours, Path(place, "hf"))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            Path(place, "hf"), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    texts = documents(config.vocab_size)
    stream, attend, _ = stream_of(texts, causal=config.causal)
    with torch.no_grad():
        # transformers computes norms and rotary embeddings in float32 in any dtype, which matters most for norms of few
        # elements.
        assert_same(ours(stream, attend, Rows()), transformers_logits(theirs, texts), 5 * TOLERANCE, "logits")


@pytest.mark.sample(15)
@pytest.mark.parametrize("case", CASES)
def test_exported_model_and_config_equal_the_original(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load(tmp_path / "hf")
    write_hf(ours, tmp_path / "out")
    assert load(tmp_path / "out").config == ours.config
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, attn_implementation="eager"
    )
    texts = documents(ours.config.vocab_size)
    stream, attend, _ = stream_of(texts, causal=ours.config.causal)
    with torch.no_grad():
        assert_same(ours(stream, attend, Rows()), transformers_logits(back, texts), TOLERANCE, "logits")


def test_failed_write_raises_on_all_ranks_and_leaves_no_files(tmp_path: Path) -> None:
    reference("gpt2-four-heads").save_pretrained(tmp_path / "hf")
    (tmp_path / "file").write_text("in the way")
    messages = run(2, fail_to_write, tmp_path / "hf", Plan(tp=2), tmp_path / "file")
    assert messages[0] == messages[1] and "exists" in messages[0]
    messages = run(2, fail_to_write, tmp_path / "hf", Plan(tp=2), tmp_path / "file" / "below")
    assert messages[0] == messages[1] and "file" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf"]
