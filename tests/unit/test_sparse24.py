"""2:4 sparsity: masks, corrections, whole models, and their recovery."""

import pytest
import torch

from colonnade.compress import Compression, compress
from colonnade.compress.gptq import damped, error
from colonnade.compress.recover import recover
from colonnade.compress.sparse24 import best_two, by_size, is_sparse24, sparsegpt
from colonnade.errors import ConfigError, DataError
from colonnade.model.weight_only_quant import quantisable_modules, quantised_kind
from tests.models import CONFIGS, MOES, build

TEXTS = [torch.randint(67, (n,), generator=torch.Generator().manual_seed(n)) for n in (60, 50, 40, 60)]
CONFIG = CONFIGS["llama_grouped_biased"].replace(ffn_width=28, init_std=0.2)


def test_two_of_four() -> None:
    scores = torch.tensor([[3.0, -1.0, 2.0, 5.0, 0.0, 0.0, 0.0, 0.0]])
    assert best_two(scores)[0, :4].tolist() == [True, False, False, True]
    assert best_two(scores).sum() == 4
    w = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert is_sparse24(by_size(w))
    assert not is_sparse24(w)
    assert not is_sparse24(w[:, :6])


def test_corrections_lower_the_error() -> None:
    generator = torch.Generator().manual_seed(1)
    w, mixed = torch.randn(24, 160, generator=generator), torch.randn(160, 160, generator=generator)
    x = torch.randn(600, 160, generator=generator) @ mixed
    hessian = (x.T @ x).double()
    pruned, plain = sparsegpt(w, hessian), by_size(w)
    assert is_sparse24(pruned)
    errors = [error(p - w, damped(hessian)) for p in (pruned, plain)]
    assert errors[0] < 0.7 * errors[1]
    assert torch.equal(sparsegpt(w, torch.eye(160, dtype=torch.float64)), plain)
    with pytest.raises(DataError, match="non-finite"):
        sparsegpt(w, hessian * torch.nan)


@pytest.mark.parametrize("by", ["gptq", "nearest"])
def test_a_model_of_experts(by) -> None:
    model = build(MOES["gated"].replace(ffn_width=28), dtype=torch.float32).requires_grad_(False)
    compress(model, Compression(weights="sparse24", by=by), TEXTS)
    assert quantised_kind(model) is None
    for name, module in quantisable_modules(model).items():
        value = module.get_parameter(name.rpartition(".")[2])
        matrices = value if value.dim() == 3 else value[None]
        for matrix in matrices:
            sparse = is_sparse24(matrix.T if name.endswith(".down") else matrix)
            assert sparse == name.startswith("blocks."), name


def test_recovery_trains_what_is_left() -> None:
    model, teacher = (build(CONFIG, dtype=torch.float32).requires_grad_(False) for _ in range(2))
    compress(model, Compression(weights="sparse24"), TEXTS)
    old = {name: p.clone() for name, p in model.named_parameters()}
    before, after = recover(model, teacher, TEXTS, 30)
    assert after < before
    changed = 0
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.dim() == 2:
            assert torch.equal(parameter == 0, old[name] == 0), name
            changed += not torch.equal(parameter, old[name])
    assert changed >= 4
    assert not any(p.requires_grad for p in model.parameters())


def test_what_has_no_fours() -> None:
    model = build(CONFIGS["llama_grouped_biased"], dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"inputs in groups of four, and 'blocks\.0\.ffn\.down\.weight' has 26"):
        compress(model, Compression(weights="sparse24", by="nearest"))
    with pytest.raises(ConfigError, match="no rule for folding"):
        compress(build(CONFIG, dtype=torch.float32), Compression(weights="sparse24", by="fold"), TEXTS)
