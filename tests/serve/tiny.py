"""A tiny model and a tiny tokenizer, built in milliseconds, importable by server processes."""

import time
from functools import cache
from itertools import count
from pathlib import Path

import tokenizers
import torch

from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Packed, Rows, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.distributed_context import DistributedContext

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on while the fox is gone.",
    "My fellow citizens: we the people, in order to form a more perfect union, ask what we can do.",
    "Äpfel, Öl und Übermut: größer als naïve façades, 你好, здравствуй, और नमस्ते! 🙂🙃",
]

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


TOOL_TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.arguments.a }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ mood }}{% endif %}"
)


@cache
def tokenizer(chat: bool = True, tools: bool = False) -> Tokenizer:
    """A byte-level BPE of about 300 tokens, whose end token separates documents; ``tools``: Mistral's tool calls."""
    parts = tokenizers.Tokenizer(tokenizers.models.BPE())
    parts.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    parts.train_from_iterator(TEXT, trainer)
    if tools:
        parts.add_special_tokens(["[TOOL_CALLS]"])
    template = TOOL_TEMPLATE if tools else TEMPLATE
    return Tokenizer(parts, bos_id=None, eos_ids=(0,), chat_template=template if chat else None)


def config(**changes: object) -> ModelConfig:
    """A Llama with odd sizes, grouped heads, and a context of 128 tokens."""
    sizes = {"vocab_size": 301, "layers": 2, "width": 24, "heads": 6, "kv_heads": 2, "head_width": 6, "ffn_width": 35}
    return ModelConfig(**{"context": 128, "init_std": 0.3, **sizes, **changes})  # type: ignore[arg-type]


def model(axes: Axes = SOLO_AXES, dtype: torch.dtype = torch.float64, **changes: object) -> Transformer:
    """Initialised with a large standard deviation, so that greedy text does not repeat one token."""
    return initialise(Transformer(config(**changes), axes, dtype=dtype), seed=1)


@torch.no_grad()
def noisy_copy(noise: float, dtype: torch.dtype = torch.float64, **changes: object) -> Transformer:
    """The model with normal noise on its weights, ``noise`` times their standard deviation: a draft model for it."""
    it, generator = model(dtype=dtype, **changes), torch.Generator().manual_seed(5)
    for weight in it.parameters():
        deviation = weight.std() if weight.numel() > 1 else 0.0
        weight.add_(noise * deviation * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype))
    return it


DEEP = 32
"""Layers of a model to draft for."""


@torch.no_grad()
def keep_two_layers(it: Transformer) -> Transformer:
    """Zero what the layers after the second add, so that the first two alone are a draft model that always agrees."""
    for block in list(it.blocks)[2:]:
        block.attention.out.weight.zero_()
        block.ffn.down.weight.zero_()
    return it


@torch.no_grad()
def greedy_tokens(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The reference: ``count`` tokens, each the argmax of a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    """logits_TV of one long forward pass, without a cache."""
    return model(Stream(torch.tensor(ids), torch.arange(len(ids))), Packed.of([len(ids)]), Rows())


def load(
    context: DistributedContext,
    chat: bool = True,
    poison: int | None = None,
    slow_s: float = 0.0,
    quick_steps: int = 0,
    wait_for: str | None = None,
    gate: str | None = None,
    tools: bool = False,
    deep: bool = False,
    drafts: bool = False,
    length: int = 128,
) -> tuple[Transformer, Tokenizer, Transformer | None]:
    """Load the model in a server's engine processes, once the file ``wait_for`` exists.

    Texts of over 500 characters are tokenised once the file ``gate`` exists.
    With ``deep`` it is :func:`deep`, with ``drafts`` rank 0 has a draft model that always agrees with it.
    With ``tools`` the template shows tools, and the context is 1,024 tokens in the place of ``length``.
    The embedding of token ``poison`` is NaN; each forward pass after the first ``quick_steps`` takes ``slow_s`` longer.
    """
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.01)
    context_tokens, layers = 1024 if tools else length, DEEP if deep else 2
    it = model(context.axes.serving(), dtype=torch.float32, context=context_tokens, layers=layers)
    if deep:
        keep_two_layers(it)
    if poison is not None:
        with torch.no_grad():
            it.get_parameter("embed.tokens.weight")[poison] = torch.nan
    if slow_s:
        steps = count()

        def wait(*_: object) -> None:
            torch.zeros(
                1
            )  # a computation outside the C++ kernels, so that steps are not recorded: replays would not wait
            time.sleep(slow_s if next(steps) >= quick_steps else 0)

        it.register_forward_pre_hook(wait)
    draft = None
    if drafts and context.rank == 0:
        whole, draft = keep_two_layers(model(dtype=torch.float32, layers=DEEP)), model(dtype=torch.float32)
        draft.load_state_dict(whole.state_dict(), strict=False)
    return it, _gated(tokenizer(chat), Path(gate)) if gate else tokenizer(chat, tools), draft


def _gated(tokenizer: Tokenizer, gate: Path) -> Tokenizer:
    encode = tokenizer.encode

    def wait(text: str, special: bool = True) -> list[int]:
        while len(text) > 500 and not gate.exists():
            time.sleep(0.01)
        return encode(text, special)

    tokenizer.encode = wait  # type: ignore[method-assign]
    return tokenizer
