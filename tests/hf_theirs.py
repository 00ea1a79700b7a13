"""transformers' side of the comparison; imports it, which workers should not."""

from typing import Any

import torch
import transformers
from torch import Tensor


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


def their_logits(model: Any, texts: list[Tensor]) -> Tensor:
    """logits_TV of each document by itself."""
    with torch.no_grad():
        return torch.cat([model(input_ids=text[None]).logits[0] for text in texts])
