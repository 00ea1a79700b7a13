"""Encoder–decoders served over tensor-parallel ranks: the same tokens as one process, beams and preemption included."""

from contextlib import nullcontext
from typing import Any

import pytest

from colonnade.config import ModelConfig, Plan, ServeConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from tests.encdec import nllb, random_model, switch, t5
from tests.serve import tiny
from tests.worlds import run as in_world

SOURCES = [tuple(range(10, 29)), tuple(range(40, 47)), (8, 9), tuple(range(10, 29))]
LIMITS = ServeConfig(pages=13, page_tokens=4, token_budget=9, max_requests=4)
MODELS = {
    "t5": (t5("1.1", vocab_size=305), Plan(tp=2)),
    "switch": (switch(vocab_size=305), Plan(tp=2, ep=2)),
    "nllb": (nllb(vocab_size=305), Plan(tp=2, etp=2)),
}


def texts(config: ModelConfig, plan: Plan) -> tuple[list[Any], int]:
    """(tokens of greedy requests and of a beam search, preemptions); in a worker or alone."""
    tokenizer = tiny.tokenizer().with_special(["eng_Latn", "fra_Latn", "deu_Latn", "<mask>"])
    languages = {}
    if config.encoder is not None and config.encoder.languages:
        languages = {"source_lang": "eng_Latn", "target_lang": "fra_Latn"}
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **languages)
    beams = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, beams=3, **languages)
    alone = nullcontext(DistributedContext.solo())
    with alone if plan.world == 1 else DistributedContext.build(plan, "cpu") as context:
        engine = Engine(random_model(config, context.axes.serving()), tokenizer, LIMITS)
        if context.rank:
            engine.follow()
            return [], 0
        found = engine.generate([*SOURCES, SOURCES[1]], [asked] * len(SOURCES) + [beams])
        engine.stop()
        engine.scheduler.audit()
        return [each.token_ids for each in found], engine.stats.preemptions


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_tokens_of_one(name: str) -> None:
    config, plan = MODELS[name]
    expected, preemptions = texts(config, Plan())
    assert preemptions > 0
    (found, again), _ = in_world(2, texts, config, plan)
    assert (found, again) == (expected, preemptions)
