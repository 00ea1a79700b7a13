"""An engine on two ranks gives one process's greedy tokens; follower ranks receive only numbers."""

import pytest
import torch

from colonnade.config import LatentConfig, ModelConfig, MoeConfig, Plan, ServeConfig
from colonnade.errors import PlanError
from colonnade.parallel import device_memory
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams, model_inputs, worker
from colonnade.serve.cache_size import affordable_pages
from colonnade.serve.http_connections import HttpConnections
from colonnade.serve.memory_estimate import EngineSpec
from tests.serve import ranks, tiny
from tests.worlds import run

CPU = torch.device("cpu")
PROMPTS = ["The quick brown", "My fellow citizens: we", "ö", "the dog sleeps on"]
LIMITS = ServeConfig(pages=16, page_tokens=3, token_budget=7, max_requests=3)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, top_k=40, seed=3, max_tokens=9, ignore_eos=True)


def _serve(world: int, changes: dict, grid: dict | None = None) -> list[tuple[int, ...]]:
    with DistributedContext.build(Plan(tp=world, **(grid or {}))) as context:
        # One process waits for each step's tokens; several run ahead, in steps of fixed shape.
        limits = LIMITS.replace(async_scheduling=world > 1, graph_capture=world > 1)
        engine = Engine(tiny.model(context.axes, **changes), tiny.tokenizer(), limits)
        if context.rank:
            engine.follow()
            return []
        engine.heartbeat()
        texts = [c.token_ids for c in engine.generate([*PROMPTS, *PROMPTS], [GREEDY] * 4 + [SAMPLED] * 4)]
        assert engine.stats.preemptions > 0
        engine.heartbeat()
        engine.stop()
        engine.scheduler.audit()
        return texts


LATENT = {"kv_heads": 6, "head_width": 6, "latent": LatentConfig(kv_rank=5, q_rank=7, rope_width=4, v_width=3)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes", [{}, {"tied": True, "window": 7, "qk_norm": True}, LATENT], ids=["llama", "tied_window", "latent"]
)
def test_two_ranks_generate_the_tokens_of_one(changes: dict) -> None:
    assert run(2, _serve, 2, changes)[0] == run(1, _serve, 1, changes)[0]


FOUR_HEADS = {"heads": 4, "kv_heads": 4}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("gpt2", 2),
        ("llama", 4),
        ("gpt2", 4),
        ("latent", 4),
    ],
)
def test_greedy_tokens_equal_the_reference_forward(name: str, tp: int) -> None:
    """With preemption, a shared prefix and odd pages; on four ranks running ahead in steps of fixed shape."""
    changes = ranks.MODELS[name] | (FOUR_HEADS if tp == 4 else {})
    limits = ranks.LIMITS.replace(async_scheduling=tp == 4, graph_capture=tp == 4)
    texts, preemptions, found, _ = run(tp, ranks.serve, {"tp": tp}, limits, changes)[0]
    assert texts == ranks.expected(changes)
    assert preemptions > 0
    assert found > 0


def _pages_with_unequal_memory() -> int:
    with DistributedContext.build(Plan(tp=2)) as context, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "free_host_bytes", lambda: (40, 30)[context.rank] << 20)
        limits = ServeConfig(max_requests=1 << 14, token_budget=16)
        return Engine(tiny.model(context.axes), tiny.tokenizer(), limits).cache.pages


def test_all_ranks_have_the_pages_of_the_one_with_least_memory() -> None:
    first, second = run(2, _pages_with_unequal_memory)
    least = EngineSpec(tiny.config(), ServeConfig(max_requests=1 << 14, token_budget=16), torch.float64, CPU, tp=2)
    assert first == second == pytest.approx(affordable_pages(least, int(0.95 * (30 << 20))), rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", [{"ep": 2}, {"etp": 2}, {}], ids=["ep", "etp", "copies"])
def test_two_ranks_with_experts_generate_the_tokens_of_one(grid: dict) -> None:
    """Also with fewer tokens than ranks: a decode step has one token per request."""
    changes = {"moe": MoeConfig(experts=4, active=2, ffn_width=6, shared_width=3, shared_gate=True)}
    assert run(2, _serve, 2, changes, grid)[0] == run(1, _serve, 1, changes)[0]


def _idle_heartbeats(count_: int) -> int:
    """Rank 0 waits as an idle server does; rank 1 counts the messages it receives meanwhile."""
    with DistributedContext.build(Plan(tp=2)) as context:
        engine = Engine(tiny.model(context.axes), tiny.tokenizer(), LIMITS)
        if context.rank:
            received = 0
            while (message := model_inputs.receive_work(context.axes.tp)) != (model_inputs.STOP, None):
                assert message == (model_inputs.IDLE, None)
                received += 1
            return received
        worker.HEARTBEAT_S = 0.05
        connections = HttpConnections(engine, {"event": "ready"})
        heartbeat, sent = engine.heartbeat, []

        def counted() -> None:
            heartbeat()
            sent.append(True)
            if len(sent) == count_:
                connections.inbox.put((None, {"do": "stop"}))

        engine.heartbeat = counted
        assert worker.receive_messages(engine, connections) == [(None, {"do": "stop"})]
        engine.stop()
        return 0


def test_idle_engine_sends_heartbeats() -> None:
    """A collective that waits too long times out, so follower ranks must receive a message now and then."""
    assert run(2, _idle_heartbeats, 3)[1] == 3


def test_data_parallel_engines_are_refused() -> None:
    model = tiny.model(Axes(dp=Axis("dp", size=2)))
    with pytest.raises(PlanError, match=r"not over dp=2; use dp=1, and one server per replica"):
        Engine(model, tiny.tokenizer(), LIMITS)
    assert isinstance(model.config, ModelConfig)
