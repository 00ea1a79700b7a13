"""Vocabulary-parallel log-probabilities equal a full log-softmax."""

import pytest
import torch

from colonnade.config import ModelConfig, Plan
from colonnade.model import IGNORE, Ring, Rows, Stream, TokenLogprobs, loss
from colonnade.model.token_logprobs import TokenScores, score_logits
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from tests.models import CONFIGS, build, pairwise, ragged
from tests.worlds import assert_same, run


def _check(config: ModelConfig, world: int, sequence_parallel: bool = False) -> None:
    with DistributedContext.build(Plan(tp=world, sequence_parallel=sequence_parallel)) as context, torch.no_grad():
        whole, mine = build(config), build(config, context.axes)
        stream, attend, targets = ragged(config)
        rows = torch.arange(0, len(targets), 2)
        logits = whole(stream, attend, Rows())
        valid = targets != IGNORE
        expected = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1).where(valid, 0.0)
        greedy = (logits.argmax(-1) == targets) & valid
        logp, flags = mine(stream, attend, TokenLogprobs(targets))
        assert_same(logp, expected, what="log-probabilities")
        assert torch.equal(flags, greedy)
        best, flags = mine(stream, attend, TokenLogprobs(logits.argmax(-1)[rows], rows))
        assert_same(best, logits.log_softmax(-1).amax(-1)[rows], what="log-probabilities of some rows")
        assert flags.all()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "world", "sequence_parallel"), pairwise(CONFIGS))
def test_logprobs_equal_a_full_log_softmax(name: str, world: int, sequence_parallel: bool) -> None:
    run(world, _check, CONFIGS[name], world, sequence_parallel)


def _check_context_parallel(plan: Plan) -> None:
    config = CONFIGS["llama"]
    with DistributedContext.build(plan) as context, torch.no_grad():
        whole, mine = build(config), build(config, context.axes)
        stream, attend, targets = ragged(config)
        expected, flags = whole(stream, attend, TokenLogprobs(targets))
        ring = Ring.of(attend, len(targets), context.axes.cp)
        own = ring.index_t
        logp, greedy = mine(Stream(stream.tokens_T[own], stream.positions_T[own]), ring, TokenLogprobs(targets[own]))
        assert_same(logp, expected[own], what="log-probabilities")
        assert torch.equal(greedy, flags[own])


@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(cp=2, tp=2, sequence_parallel=True)], ids=str)
def test_logprobs_under_context_parallelism(plan: Plan) -> None:
    run(plan.world, _check_context_parallel, plan)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["llama"]
    model = build(config)
    stream, attend, targets = ragged(config)
    whole = model(stream, attend, TokenLogprobs(targets))[0]
    monkeypatch.setitem(loss.CHUNK_ROWS, "cpu", 3)
    assert_same(model(stream, attend, TokenLogprobs(targets))[0], whole, what="log-probabilities in chunks of 3")


def test_results_have_no_gradient() -> None:
    config = CONFIGS["llama"]
    stream, attend, targets = ragged(config)
    with pytest.raises(RuntimeError, match="does not require grad"):
        build(config)(stream, attend, TokenLogprobs(targets))[0].sum().backward()


def _scores(logits_RV: torch.Tensor, targets_R: torch.Tensor, top: int) -> TokenScores:
    tp = world_axis()
    start, stop = tp.part(logits_RV.shape[1])
    return score_logits(logits_RV[:, start:stop], targets_R, tp, logits_RV.shape[1], top=top)


def _tied(V: int) -> torch.Tensor:
    """Many equal logits, equal maxima on several ranks."""
    return torch.randn(40, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64).round()


@pytest.mark.parametrize("V", [1, 5, 301])
def test_alternatives_and_ties(V: int) -> None:
    """The first alternative and the greedy flag are those of argmax, also where ranks have equal maxima."""
    logits_RV = _tied(V)
    targets_R = torch.arange(40) % V
    logp_RV = logits_RV.log_softmax(-1)
    for world in (1, 2, 3):
        for scores in run(world, _scores, logits_RV, targets_R, 20):
            assert_same(scores.logp_R, logp_RV.gather(1, targets_R[:, None]).squeeze(1), what="log-probabilities")
            assert torch.equal(scores.greedy_R, logits_RV.argmax(-1) == targets_R)
            assert torch.equal(scores.top_ids_RK[:, 0], logits_RV.argmax(-1))
            assert scores.top_ids_RK.shape == (40, min(V, 20))
            assert_same(scores.top_logp_RK, logp_RV.topk(min(V, 20)).values, what="alternatives")
            assert_same(logp_RV.gather(1, scores.top_ids_RK), scores.top_logp_RK, what="their ids")
            assert all(len(set(row)) == len(row) for row in scores.top_ids_RK.tolist())


def test_a_chosen_alternative_has_the_same_bits() -> None:
    """Clients compare the token's log-probability with the alternatives'."""
    logits_RV = torch.randn(50, 97, generator=torch.Generator().manual_seed(0))
    targets_R = logits_RV.topk(3).indices[:, 2]
    scores = score_logits(logits_RV, targets_R, top=3)
    assert torch.equal(scores.logp_R, scores.top_logp_RK[:, 2])
    assert torch.equal(scores.top_ids_RK[:, 2], targets_R)
