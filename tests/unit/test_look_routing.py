"""`look routing`: the tables report the router's choices."""

import io

import pytest
import torch
from rich.console import Console

from colonnade.config import MoeConfig
from colonnade.errors import RequestError
from colonnade.look import classify_tokens, record_routing, routing_tables
from colonnade.model import Packed, Rows, Stream
from colonnade.model.moe.expert_specialization import record_choices
from colonnade.model.score import score
from tests.serve import tiny

TEXT = "My fellow citizens, in 1862 we met. " * 3
MOE = MoeConfig(experts=4, active=2, ffn_width=6, first_k_dense_replace=1)


def test_tables_count_every_choice_once() -> None:
    model, tokenizer = tiny.model(moe=MOE), tiny.tokenizer()
    tokens = tokenizer.encode(TEXT)
    tables = record_routing(model, tokenizer, tokens, context=16)
    assert tables.score == score(model, tokens, context=16)
    assert list(tables.layers) == [layer for layer in range(model.config.layers) if layer]
    for it in tables.layers.values():
        assert sum(map(sum, it.counts)) == 2 * (len(tokens) - 1), "two choices for each input token"
        kinds = classify_tokens([tokenizer.decode([token]) for token in tokens[:-1]])
        assert {kind: sum(row) for kind, row in zip(it.kinds, it.counts, strict=True)} == {
            kind: 2 * kinds.count(kind) for kind in set(kinds)
        }


def test_tokens_of_one_expert_are_its_examples() -> None:
    """The router is set so that only commas go to expert 3."""
    model, tokenizer = tiny.model(moe=MOE.replace(active=1, first_k_dense_replace=0)), tiny.tokenizer()
    (comma,) = tokenizer.encode(",")
    tokens = tokenizer.encode(TEXT)
    with torch.no_grad(), record_choices(model):
        assert model.embed is not None
        stream = Stream(torch.tensor(tokens), torch.arange(len(tokens)))
        model(stream, Packed.of([len(tokens)]), Rows())
        gate = model.blocks[0].ffn.router.gates[0]
        gate.weight.zero_()
        hidden = {}
        hook = model.blocks[0].ffn.router.register_forward_hook(lambda _, inputs, __: hidden.update(x=inputs[0]))
        model(stream, Packed.of([len(tokens)]), Rows())
        hook.remove()
        is_comma = torch.tensor([token == comma for token in tokens])
        # The direction that separates commas from everything else, by least squares.
        direction = torch.linalg.lstsq(hidden["x"].double(), (2.0 * is_comma - 1)[:, None].double()).solution[:, 0]
        gate.weight[3] = direction.to(gate.weight.dtype)
    tables = record_routing(model, tokenizer, tokens, context=len(tokens))
    first = tables.layers[0]
    taken = {kind: row[3] for kind, row in zip(first.kinds, first.counts, strict=True)}
    assert taken["punctuation"] >= 2 and tables.texts[0][3][0] == ","
    shown = Console(width=120, record=True, file=io.StringIO())
    shown.print(routing_tables(tables)[0])
    assert "punctuation x" in shown.export_text()


def test_dense_model_is_refused() -> None:
    with pytest.raises(RequestError, match="this model has no experts"):
        record_routing(tiny.model(), tiny.tokenizer(), [1, 2, 3])
