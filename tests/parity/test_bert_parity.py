"""BERT with pre- and post-norm: any tensor-parallel layout equals one process, which equals transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from colonnade.checkpoint.hf import FAMILIES, config_from_hf, config_to_hf
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.weight_mapping import map_parameters
from colonnade.config import ModelConfig, Plan
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import (
    IGNORE,
    Classes,
    Hidden,
    Loss,
    Packed,
    Pooled,
    Pretraining,
    Rows,
    SentenceOrders,
    Spans,
    Stream,
    Transformer,
)
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import PARTIAL, layout_of, local_part
from tests.hf import LENGTHS, load
from tests.models import BERTS, build, pairs, pairwise
from tests.worlds import assert_same, run

FIRST = torch.tensor([0, 7, 8, 21])
"""First rows of the four documents of tests.models.LENGTHS."""
ORDERS = torch.tensor([1, IGNORE, 0, 1])


def results(model: Transformer) -> dict[str, Tensor]:
    """All outputs of the model's top; the last one is a loss."""
    stream, attend, targets = pairs(model.config)
    rows = torch.cat(((targets != IGNORE).nonzero()[:, 0], torch.tensor([4])))
    outputs = {"hidden": model(stream, attend, Hidden())}
    weight = torch.linspace(-1, 1, model.config.width, dtype=torch.float64)
    match model.config.task_head:
        case "masked":
            outputs["logits"] = model(stream, attend, Rows())
            whole, count = model(stream, attend, Loss(targets, 0.1))
            outputs["loss"], outputs["count"] = model(stream, attend, Loss(targets[rows], 0.1, rows))
            assert_same(outputs["loss"], whole, what="loss of the selected rows only")
            assert count == outputs["count"] == (targets != IGNORE).sum() > 0
        case "pretraining":
            outputs["order"] = model(stream, attend, SentenceOrders(FIRST))
            wanted = Loss(targets[rows], rows_R=rows)
            outputs["loss"], count = model(stream, attend, Pretraining(wanted, SentenceOrders(FIRST), ORDERS, 3.0))
            masked, expected = model(stream, attend, wanted)
            by_hand = torch.nn.functional.cross_entropy(outputs["order"], ORDERS, ignore_index=IGNORE, reduction="sum")
            assert_same(outputs["loss"], masked + 3 * by_hand, what="sum of the two losses")
            assert count == expected
        case "encoder":
            outputs["pooled"] = model(stream, attend, Pooled(FIRST))
            outputs["loss"] = (outputs["pooled"] @ weight).square().sum()
        case "classes":
            outputs["classes"] = model(stream, attend, Classes(FIRST))
            outputs["loss"] = outputs["classes"].square().sum()
        case _:
            outputs["spans"] = model(stream, attend, Spans())
            outputs["loss"] = outputs["spans"].square().sum()
    return outputs


def _check(config: ModelConfig, world: int, sequence_parallel: bool) -> None:
    with DistributedContext.build(Plan(tp=world, sequence_parallel=sequence_parallel)) as context:
        whole, mine = build(config), build(config, context.axes)
        layout = layout_of(mine)
        expected, got = results(whole), results(mine)
        for name, value in expected.items():
            assert_same(got[name], value, what=name)
        expected["loss"].backward()
        got["loss"].backward()
        for name, p in mine.named_parameters():
            reference = whole.get_parameter(name).grad
            assert (p.grad is None) == (reference is None), name
            if p.grad is not None:
                grad = context.axes.tp.sum_(p.grad) if layout[name] is PARTIAL else p.grad
                assert grad.abs().max() > 0, f"{name} does not contribute to the loss"
                assert_same(grad, local_part(reference, layout[name], context.axes), what=f"gradient of {name}")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "world", "sequence_parallel"), pairwise(BERTS))
def test_tensor_parallel_equals_one_process(name: str, world: int, sequence_parallel: bool) -> None:
    run(world, _check, BERTS[name], world, sequence_parallel)


SIZES = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 41, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 32, "type_vocab_size": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CLASSES = [
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertModel",
    "BertForSequenceClassification",
    "BertForQuestionAnswering",
    "MegatronBertForPreTraining",
    "MegatronBertForMaskedLM",
    "MegatronBertModel",
    "MegatronBertForSequenceClassification",
    "MegatronBertForQuestionAnswering",
]


def reference(name: str) -> Any:
    """transformers' model in float64, with weights large enough for every part to matter."""
    kind = getattr(transformers, name)
    labels = {"id2label": {i: f"L{i}" for i in range(5)}} if "Sequence" in name else {}
    config = kind.config_class(**SIZES, **labels, hidden_act="gelu_new" if "Masked" in name else "gelu")
    torch.manual_seed(len(name))
    config._attn_implementation = "eager"
    model = kind(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model


def inputs() -> tuple[list[Tensor], list[Tensor]]:
    """Texts and their segments."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(101, (n,), generator=generator) for n in LENGTHS]
    return texts, [(torch.arange(n) >= n // 3).long() for n in LENGTHS]


def ours_of(model: Transformer) -> dict[str, Tensor]:
    """Our outputs under transformers' names."""
    texts, segments = inputs()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    stream = Stream(torch.cat(texts), positions, torch.cat(segments))
    attend = Packed.of(LENGTHS, causal=False)
    first = attend.cu_seqlens[:-1].long()
    outputs_of = lambda head: model(stream, attend, head)  # noqa: E731
    match model.config.task_head:
        case "pretraining":
            return {
                "prediction_logits": outputs_of(Rows()),
                "seq_relationship_logits": outputs_of(SentenceOrders(first)),
            }
        case "masked":
            return {"logits": outputs_of(Rows())}
        case "encoder":
            return {"last_hidden_state": outputs_of(Hidden()), "pooler_output": outputs_of(Pooled(first))}
        case "classes":
            return {"logits": outputs_of(Classes(first))}
        case _:
            start, end = outputs_of(Spans()).unbind(1)
            return {"start_logits": start, "end_logits": end}


def theirs_of(model: Any, names: list[str]) -> dict[str, Tensor]:
    """transformers' outputs, documents concatenated; one row per text for the outputs of a whole text."""
    texts, segments = inputs()
    parts = [model(input_ids=t[None], token_type_ids=s[None]) for t, s in zip(texts, segments, strict=True)]
    of_texts = ("seq_relationship_logits", "pooler_output", *(["logits"] if hasattr(model, "classifier") else []))
    return {
        name: torch.cat([getattr(part, name) if name in of_texts else getattr(part, name)[0] for part in parts])
        for name in names
    }


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_every_gradient_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load(tmp_path / "hf")
    assert ours.config.norm_order == ("pre" if "Megatron" in name else "post")
    got = ours_of(ours)
    expected = theirs_of(theirs, list(got))
    for key, value in got.items():
        assert_same(value, expected[key].detach(), 1e-6, key)
    weights = {key: torch.rand_like(value) for key, value in got.items()}
    sum((value * weights[key]).sum() for key, value in got.items()).backward()
    sum((value * weights[key]).sum() for key, value in expected.items()).backward()
    forms = map_parameters([n for n, _ in ours.named_parameters()], FAMILIES[ours.config.family].table, name)
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    compared = 0
    for key, parameter in ours.named_parameters():
        for theirs_name, gradient in forms[key].write(parameter.grad, ours.config).items():
            reference_name = theirs_name if theirs_name in gradients else theirs_name.removeprefix("bert.")
            assert_same(gradient, gradients[reference_name], 1e-6, theirs_name)
            compared += 1
    assert compared == len(gradients)


def _relay(folder: Path, plan: Plan, out: Path) -> dict[str, Tensor]:
    with DistributedContext.build(plan, "cpu") as context:
        model = load(folder, context.axes)
        write_hf(model, out, shard_bytes=4000)
        return {name: value.detach() for name, value in ours_of(model).items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "tp"),
    # Each head and each of the two families over two and over three processes.
    [(name, 2 + (i + i // 5) % 2) for i, name in enumerate(CLASSES)] + [(CLASSES[0], 1), (CLASSES[6], 1)],
)
def test_any_layout_reads_and_writes_the_same_model(name: str, tp: int, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "hf")
    results = run(tp, _relay, tmp_path / "hf", Plan(tp=tp), tmp_path / "out")
    expected = theirs_of(theirs, list(results[0]))
    for result in results:
        for key, value in result.items():
            assert_same(value, expected[key].detach(), 1e-6, key)
    assert load(tmp_path / "out").config == load(tmp_path / "hf").config
    back = getattr(transformers, name).from_pretrained(tmp_path / "out", dtype="auto")
    weights, original = back.state_dict(), theirs.state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[key], original[key]) for key in weights)


def test_old_tensorflow_style_files_load(tmp_path: Path) -> None:
    """bert-base-uncased on the Hub: TensorFlow's names, a copied embedding, and more tensors than needed."""
    theirs = reference("BertForPreTraining")
    theirs.save_pretrained(tmp_path / "new")
    theirs.save_pretrained(tmp_path / "old")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(tmp_path / "new" / "model.safetensors").items()
    }
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors["bert.embeddings.position_ids"] = torch.arange(32.0)[None]
    saved_config = json.loads((tmp_path / "new" / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "old" / "config.json").write_text(json.dumps(saved_config))
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    new, old = load(tmp_path / "new"), load(tmp_path / "old")
    assert old.config == new.config
    assert all(torch.equal(p, old.get_parameter(name)) for name, p in new.named_parameters())

    tensors["cls.predictions.decoder.bias"] += 1
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'cls\.predictions\.decoder\.bias' that differs"):
        load(tmp_path / "old")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "known classes are BertModel, BertForPreTraining"),
        ({"architectures": [["BertModel"]]}, "known classes are"),
        ({"position_embedding_type": "relative_key"}, "only absolute positions"),
        ({"is_decoder": True}, "only the encoder"),
        ({"tie_word_embeddings": False}, "BERT ties its output projection to the embedding"),
        ({"hidden_act": "quick_gelu"}, "known activations"),
    ],
)
def test_unsupported_bert_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    raw = {"model_type": "bert", **SIZES, "architectures": ["BertModel"]}
    assert config_from_hf(raw).task_head == "encoder"
    with pytest.raises(CheckpointError, match=message):
        config_from_hf(raw | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, "causal = True and task_head = 'pretraining' cannot be combined"),
        ({"window": 5}, "causal = False and window = 5 cannot be combined"),
        ({"task_head": "classes"}, "task_head = 'classes' and classes = 0"),
        ({"classes": 3}, "task_head = 'pretraining' and classes = 3"),
        ({"task_head": "spans", "tied": False}, "no output projection to untie"),
    ],
)
def test_inconsistent_encoder_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BERTS["post_pretraining"].replace(**changes)


@pytest.mark.parametrize("changes", [{"norm_order": "pre"}, {"embed_norm": False}, {"tied": False}, {"gated": True}])
def test_configs_that_bert_files_cannot_express_are_not_saved(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"'bert' files cannot represent {next(iter(changes))}"):
        config_to_hf(BERTS["post_pretraining"].replace(**changes))
