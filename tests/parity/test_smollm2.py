"""A real model: SmolLM2-135M-Instruct from a quantised GGUF file against transformers, on 800 tokens."""

from pathlib import Path

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from colonnade.checkpoint.gguf import GGUFFile
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.load_model import find_packaged
from colonnade.config.presets import preset
from colonnade.model import Packed, Rows, Stream, Transformer
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.layout import layout_of, local_part
from tests.gguf_files import NAMES, interleave, speech

DOCUMENTS, LENGTH = 2, 400


@pytest.fixture(scope="module")
def file() -> GGUFFile:
    return GGUFFile(find_packaged("smollm2"))


@pytest.fixture(scope="module")
def ours(file: GGUFFile) -> Transformer:
    model = Transformer(file.config)
    file.load_weights(model)
    return model


def theirs(config_folder: Path) -> transformers.LlamaForCausalLM:
    """transformers' model from tensors dequantised by the gguf package, with names and row order mapped by hand."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(config_folder))
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    their_names = {
        ours: theirs for theirs, ours in NAMES.items() if "transformer." not in theirs and ".c_" not in theirs
    }
    their_names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(find_packaged("smollm2")).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        stem, _, kind = tensor.name.rpartition(".")
        prefix = ""
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".")
            prefix = f"model.layers.{layer}."
        if stem in heads:
            order = interleave(torch.arange(len(values)), heads[stem])
            values = torch.empty_like(values).index_copy_(0, order, values)
        state[f"{prefix}{their_names[stem]}.{kind}"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def test_config_equals_the_published_one(file: GGUFFile) -> None:
    assert file.config == preset("smollm2-135m")


@pytest.mark.slow
def test_logits_equal_transformers_and_the_export_loads(file: GGUFFile, ours: Transformer, tmp_path: Path) -> None:
    write_hf(ours, tmp_path / "hf")
    reference = theirs(tmp_path / "hf")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    expected = reference.state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)

    tokens = torch.tensor(file.tokenizer().tokenizer.encode(speech()).ids[: DOCUMENTS * LENGTH])
    stream = Stream(tokens, torch.arange(LENGTH).repeat(DOCUMENTS))
    with torch.no_grad():
        got = ours(stream, Packed.of([LENGTH] * DOCUMENTS), Rows())
        logits = reference(input_ids=tokens.view(DOCUMENTS, LENGTH)).logits.flatten(0, 1)
    assert len(got) == DOCUMENTS * LENGTH
    assert (got - logits).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), logits.argmax(-1))


@pytest.mark.slow
def test_each_of_three_ranks_loads_its_shard(file: GGUFFile, ours: Transformer) -> None:
    layout, axis = layout_of(ours), Axis("tp", 3, 1)
    model = Transformer(file.config, Axes(tp=axis))
    file.load_weights(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, local_part(ours.get_parameter(name), layout[name], Axes(tp=axis))), name


def test_generates_paris_as_the_capital_of_france(file: GGUFFile, ours: Transformer) -> None:
    tokenizer = file.tokenizer().tokenizer
    ids = tokenizer.encode("The capital of France is").ids
    for _ in range(3):
        T = len(ids)
        with torch.no_grad():
            logits = ours(Stream(torch.tensor(ids), torch.arange(T)), Packed.of([T]), Rows(torch.tensor([T - 1])))
        ids.append(int(logits.argmax()))
    assert tokenizer.decode(ids) == "The capital of France is Paris.\n"
