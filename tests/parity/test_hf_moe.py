"""MoE families against transformers: logits, loss, gradients, balance loss, and files in both layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import colonnade
from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import Plan
from colonnade.errors import CheckpointError
from colonnade.model import Loss, Transformer
from colonnade.model.moe import Routing
from tests.hf import documents, load, load_and_save, resave, stream_of
from tests.hf_reference import TOLERANCE, random_model, same_as_transformers, same_gradients, transformers_logits
from tests.worlds import assert_same, run

COMMON = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 10,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "rope_theta": 500.0,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": True},
    "mixtral-window": {
        "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5, "head_dim": 10,
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **QWEN, "shared_expert_intermediate_size": 14, "norm_topk_prob": True},
    "qwen2_moe-some-layers": {
        "model_type": "qwen2_moe", **QWEN, "shared_expert_intermediate_size": 9, "num_hidden_layers": 5,
        "decoder_sparse_step": 2, "mlp_only_layers": [1], "qkv_bias": False,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **QWEN, "head_dim": 10, "norm_topk_prob": True},
    "qwen3_moe-biases-window": {
        "model_type": "qwen3_moe", **QWEN, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4,
        "mlp_only_layers": [0, 2], "num_hidden_layers": 4,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 1},
    "olmoe-one": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True},
    "mixtral-one": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
    "olmoe-clipped": {
        "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.8, "norm_topk_prob": True,
        "num_key_value_heads": 6,
    },
    "deepseek_v2-lite": {
        "model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "n_routed_experts": 6, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2-yarn-biases": {
        "model_type": "deepseek_v2", **LATENT, "q_lora_rank": 12, "n_routed_experts": 4, "attention_bias": True,
        "rope_parameters": YARN, "n_shared_experts": 1,
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2", **LATENT, "q_lora_rank": 12, "n_routed_experts": 8, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1, "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **LATENT, "q_lora_rank": 12, "n_routed_experts": 8, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_mtp_layers": 0,
    },
    "deepseek_v3-yarn": {
        "model_type": "deepseek_v3", **LATENT, "q_lora_rank": None, "n_routed_experts": 6, "first_k_dense_replace": 0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2, "num_mtp_layers": 0,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip
CASES |= {
    f"{case}-bidirectional": {**CASES[case], "is_causal": False}
    for case in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe-clipped", "deepseek_v2-lite", "deepseek_v3")
}


def reference(case: str) -> Any:
    """transformers' model of a case; a bias that is added to scores is not 0."""
    settings = dict(CASES[case])
    model = random_model(settings.pop("model_type"), COMMON | settings, seed=len(case))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def gradients_by_file_name(model: Any) -> dict[str, Tensor]:
    """Each parameter's gradient by its name in the file, with experts one by one."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        mixtral = model.config.model_type == "mixtral"
        place = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        if name.endswith("gate_up_proj"):
            for e, gradient in enumerate(parameter.grad):
                for part, half in zip(parts[:2], gradient.chunk(2), strict=True):
                    found[f"{place.removesuffix('gate_up_proj')}{e}.{part}.weight"] = half
        elif name.endswith("experts.down_proj"):
            for e, gradient in enumerate(parameter.grad):
                found[f"{place.removesuffix('down_proj')}{e}.{parts[2]}.weight"] = gradient
        else:
            found[place] = parameter.grad
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    same_as_transformers(load(tmp_path / "hf"), theirs, gradients_by_file_name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_exported_model_and_config_equal_the_original(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load(tmp_path / "hf")
    write_hf(ours, tmp_path / "out", shard_bytes=20_000)
    assert load(tmp_path / "out").config == ours.config
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    weights, original = back.state_dict(), theirs.state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name].to(weights[name].dtype)) for name in weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("mixtral", Plan(tp=3)),
        ("qwen2_moe", Plan(tp=3)),
        ("qwen3_moe", Plan(dp=2)),
        ("olmoe", Plan(tp=3)),
        ("olmoe-clipped", Plan(tp=2)),
        ("deepseek_v2-lite", Plan(tp=2)),
        ("deepseek_v2-yarn-biases", Plan(tp=3)),
    ],
)
def test_any_dense_layout_loads_and_saves_the_same_model(case: str, plan: Plan, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    results = run(plan.world, load_and_save, tmp_path / "hf", plan, tmp_path / "out")
    expected = transformers_logits(theirs, documents(theirs.config.vocab_size))
    for logits in results:
        assert_same(logits, expected, TOLERANCE, "logits")
    assert same_files(tmp_path / "hf", tmp_path / "out")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("mixtral", Plan(dp=2, ep=2)),
        ("qwen2_moe", Plan(dp=2, etp=2)),
        ("qwen3_moe", Plan(dp=3, ep=3)),
        ("deepseek_v2-lite", Plan(tp=2, dp=2, ep=2, etp=2)),
        ("olmoe", Plan(tp=3, ep=3)),
        ("mixtral", Plan(dp=2, tp=1, replicate=2, ep=4)),
    ],
)
def test_expert_layouts_load_their_slices_and_save_the_same_file(case: str, plan: Plan, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    expected = transformers_logits(theirs, documents(theirs.config.vocab_size))
    whole = {name: p.numel() for name, p in load(tmp_path / "hf").named_parameters() if ".experts." in name}
    for saved_tensors, logits in run(plan.world, resave, tmp_path / "hf", plan, tmp_path / "out"):
        assert saved_tensors == {name: n // (plan.ep * plan.etp) for name, n in whole.items()}
        assert_same(logits, expected, TOLERANCE, "logits")
    assert same_files(tmp_path / "hf", tmp_path / "out")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_files(a: Path, b: Path) -> bool:
    before, after = tensors(a), tensors(b)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_column_major_weights_load_and_save_unchanged(tmp_path: Path) -> None:
    """float16 on a CPU (colonnade.kernels.experts.loop.down_column_major)."""
    theirs = reference("mixtral").half()
    theirs.save_pretrained(tmp_path / "hf")
    ours = colonnade.load(tmp_path / "hf", dtype="float16", device="cpu")
    down = ours.transformer.get_parameter("blocks.0.ffn.experts.down")
    assert down.mT.is_contiguous() and not down.is_contiguous()
    exact = colonnade.load(tmp_path / "hf", dtype="float32", device="cpu").logits([1, 2, 3])
    assert float((ours.logits([1, 2, 3]) - exact).norm() / exact.norm()) < 5e-3
    for form in ("hf", "colonnade"):
        colonnade.save(ours, tmp_path / form / "out", format=form)
        back = colonnade.load(tmp_path / form / "out", dtype="float16", device="cpu")
        for name, parameter in ours.transformer.named_parameters():
            assert torch.equal(parameter, back.transformer.get_parameter(name)), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "deepseek_v2-lite"])
def test_files_with_stacked_experts_load(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in tensors(tmp_path / "stacked"))
    one_by_one, at_once = load(tmp_path / "hf"), load(tmp_path / "stacked")
    assert one_by_one.config == at_once.config
    for name, parameter in one_by_one.named_parameters():
        assert torch.equal(parameter, at_once.get_parameter(name)), name

    grid = Plan(dp=4, ep=2, etp=2)
    run(grid.world, resave, tmp_path / "stacked", grid, tmp_path / "out")
    assert same_files(tmp_path / "hf", tmp_path / "out")


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v2-lite"])
def test_missing_or_extra_expert_is_named(case: str, tmp_path: Path) -> None:
    reference(case).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    saved_tensors = load_file(file)
    (name,) = [
        name
        for name in saved_tensors
        if "layers.2." in name and "experts.3." in name and name.endswith(("w2.weight", "down_proj.weight"))
    ]

    save_file({other: value for other, value in saved_tensors.items() if other != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks the tensor '{name}'"):
        HFFolder(tmp_path)
    extra = name.replace("experts.3.", "experts.6.")
    save_file({**saved_tensors, extra: saved_tensors[name].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"contains '{extra}', which the model does not have"):
        HFFolder(tmp_path)
    save_file({**saved_tensors, name: saved_tensors[name][:, :-1].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"contains '{name}' of shape"):
        HFFolder(tmp_path)


@pytest.mark.sample(9)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "qwen3_moe-biases-window"])
def test_balance_loss_and_gradients_equal_transformers(case: str, layers: int, tmp_path: Path) -> None:
    """Over all layers with experts together; transformers' padding does not count."""
    settings = COMMON | CASES[case] | {"num_hidden_layers": layers, "router_aux_loss_coef": 0.7}
    if "mlp_only_layers" in settings:
        dense = [0, 2] if layers > 2 else [0] if layers > 1 else []
        settings |= {"mlp_only_layers": dense, "use_sliding_window": False}  # their window turns padding into NaN
    theirs = random_model(settings.pop("model_type"), settings | {"output_router_logits": True}, seed=1)
    theirs.save_pretrained(tmp_path / "hf")
    files = HFFolder(tmp_path / "hf")
    moe = files.config.moe
    assert moe is not None
    assert (moe.balance, moe.balance_over, moe.balance_weight) == ("choices", "model", 0.7)
    ours = Transformer(
        files.config.replace(moe=moe.replace(z_weight=0)), dtype=torch.float64
    )  # the authors of OLMoE had one
    files.load_weights(ours)
    texts = sorted(documents(ours.config.vocab_size), key=len)[-2:]
    stream, attend, targets = stream_of(texts)
    T = len(targets)
    routing = Routing(torch.arange(T), weight=1 / T)
    total, count = ours(stream._replace(routing=routing), attend, Loss(targets))
    (total / count).backward()

    padded, labels = (torch.nn.utils.rnn.pad_sequence(texts, True, value) for value in (0, -100))
    assert padded.numel() > T
    out = theirs(input_ids=padded, labels=labels, attention_mask=(labels >= 0).long())
    out.loss.backward()
    balance = routing.pooled.balance
    assert balance is not None
    assert_same(balance, out.aux_loss.detach().double(), TOLERANCE, "balance loss")
    assert_same(total.detach() / count + 0.7 * balance, out.loss.detach(), TOLERANCE, "loss")
    same_gradients(
        ours, gradients_by_file_name(theirs), 4 * TOLERANCE
    )  # each layer of transformers' model rounds to float32


def test_per_layer_balance_loss_matches_the_router_logits(tmp_path: Path) -> None:
    theirs = reference("qwen3_moe")
    theirs.save_pretrained(tmp_path / "hf")
    files = HFFolder(tmp_path / "hf")
    assert files.config.moe is not None
    ours = Transformer(files.config.replace(moe=files.config.moe.replace(balance_over="layer")), dtype=torch.float64)
    files.load_weights(ours)
    text = documents(ours.config.vocab_size)[2]
    stream, attend, targets = stream_of([text])
    routing = Routing(torch.arange(len(text)), weight=1.0)
    ours(stream._replace(routing=routing), attend, Loss(targets))
    with torch.no_grad():
        scores = theirs(input_ids=text[None], output_router_logits=True).router_logits
    assert len(scores) == len(routing.reports) == 3
    for layer, report in routing.reports.items():
        assert_same(report.balance, load_balancing_loss_func((scores[layer],), 6, 3).double(), TOLERANCE, "balance")
