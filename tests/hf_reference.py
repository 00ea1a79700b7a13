"""transformers' side of the comparison; imports transformers, which workers should not.

transformers computes RMSNorm, softmax and the loss in float32 whatever the model's type, so equality is to 1e-6.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from colonnade.checkpoint.hf import FAMILIES
from colonnade.checkpoint.weight_mapping import map_parameters
from colonnade.model import Loss, Rows, Stream, Transformer
from tests.hf import documents, stream_of
from tests.worlds import assert_same

TOLERANCE = 1e-6


def random_model(kind: str, settings: dict[str, Any], seed: int) -> Any:
    """transformers' model of ``kind`` in float64, its weights large enough for every part to matter."""
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model.eval()


def transformers_logits(model: Any, texts: list[Tensor]) -> Tensor:
    """logits_TV of the documents, each run alone."""
    with torch.no_grad():
        return torch.cat([model(input_ids=text[None]).logits[0] for text in texts])


def gradients_by_name(model: Any) -> dict[str, Tensor]:
    """Each parameter's gradient by name."""
    return {name: p.grad for name, p in model.named_parameters()}


def same_as_transformers(
    ours: Transformer, theirs: Any, gradients: Callable[[Any], dict[str, Tensor]] = gradients_by_name
) -> None:
    """Compare logits, loss and every gradient; ``gradients`` maps their checkpoint names to gradients."""
    texts = documents(ours.config.vocab_size)
    stream, attend, targets = stream_of(texts, causal=ours.config.causal)
    assert_same(ours(stream, attend, Rows()), transformers_logits(theirs, texts), TOLERANCE, "logits")
    total, count = ours(stream, attend, Loss(targets))
    (total / count).backward()
    loss = sum(theirs(input_ids=text[None], labels=text[None]).loss * (len(text) - 1) for text in texts) / count
    loss.backward()
    assert_same(total / count, loss.detach(), TOLERANCE, "loss")
    found = gradients(theirs)
    # 3e-6: transformers rounds norms and losses to float32, differently on each kind of processor.
    assert same_gradients(ours, found, 3 * TOLERANCE) == len(found)


def same_loss_and_gradients(
    ours: Transformer, theirs: Any, inputs: tuple[Stream, Any], logits_TV: Tensor, labels_T: Tensor, *,
    tolerance: float = TOLERANCE, gradients: Callable[[Any], dict[str, Tensor]] = gradients_by_name,
) -> None:  # fmt: skip
    """Compare the mean loss and every gradient, given the other model's differentiable logits of the same pass."""
    total, count = ours(*inputs, Loss(labels_T))
    loss = torch.nn.functional.cross_entropy(logits_TV, labels_T)
    assert_same(total / count, loss.detach(), TOLERANCE, "loss")
    (total / count).backward()
    loss.backward()
    found = gradients(theirs)
    assert same_gradients(ours, found, tolerance) == len(found)


def same_gradients(ours: Transformer, theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> int:
    """Compare our gradients, in checkpoint format, with theirs by name; returns the number compared."""
    names = [name for name, _ in ours.named_parameters()]
    forms, compared = map_parameters(names, FAMILIES[ours.config.family].table, "the gradients"), 0
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        for their_name, gradient in forms[name].write(parameter.grad, ours.config).items():
            assert_same(gradient, theirs[their_name], tolerance, their_name)
            compared += 1
    return compared
