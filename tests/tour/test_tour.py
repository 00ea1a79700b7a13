"""Ten tests that introduce Colonnade, from ``merge`` to a server. Read them from the top.

    make pytest ARGS=tests/tour

They are independent of each other; any of them can be run alone.
"""

import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch

import colonnade
from colonnade import ModelConfig, Plan, RunConfig, Trainer
from colonnade.checkpoint import native
from colonnade.config import DataConfig, TrainConfig
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError, PlanError
from colonnade.kernels.attention.reference import attend as attend_to
from colonnade.kernels.softmax_state import identity, merge
from colonnade.model import KVCache, Loss, Packed, Paged, Rows, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES, Axes, Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of, local_part
from tests.worlds import run as in_processes

TINY = ModelConfig(vocab_size=300, layers=2, width=32, heads=4, kv_heads=2, ffn_width=50, context=64, tied=True)
TOKENS_T = torch.tensor([5, 17, 3, 299, 42, 7, 7, 64])
POSITIONS_T = torch.arange(8)


def tiny(axes=SOLO_AXES) -> Transformer:
    """The same weights under every layout: they depend only on the seed and the parameter's name."""
    return initialise(Transformer(TINY, axes, dtype=torch.float64), seed=0)


def test_1_attention_is_a_fold() -> None:
    """Attend to parts of the keys separately, then merge in any order: the result is attention to all keys.

    A state is (output, log of the softmax's denominator); the empty one is the identity."""
    q_TNH = torch.randn(3, 4, 8, dtype=torch.float64)
    k_SKH, v_SKH = torch.randn(2, 10, 2, 8, dtype=torch.float64)

    whole = attend_to(q_TNH, k_SKH, v_SKH, causal=False)
    a, b, c = (attend_to(q_TNH, k_SKH[i:j], v_SKH[i:j], causal=False) for i, j in ((0, 4), (4, 5), (5, 10)))

    for folded in (merge(merge(a, b), c), merge(c, merge(b, a)), merge(merge(identity(a.o), a), merge(b, c))):
        torch.testing.assert_close(folded, whole)


def test_2_a_model_is_a_configuration() -> None:
    """Sizes and options are frozen data, checked on construction.

    A mistake raises a one-line error with the problem and the remedy."""
    assert TINY.parameters == sum(p.numel() for p in tiny().parameters()) == 25_504
    assert TINY.head_width == 8
    with pytest.raises(ConfigError, match=r"^ModelConfig has no key 'layres'; did you mean 'layers'\?$"):
        TINY.replace(layres=3)


def test_3_one_line_trains_and_scores() -> None:
    """The forward pass takes a token stream, an attention pattern and a head for the wanted output.

    Sequences of 5 and 3 tokens are packed without padding; the loss is a sum and a count."""
    model = tiny()
    targets_T = torch.tensor([17, 3, 299, 42, -100, 7, 64, -100])  # -100: nothing to predict
    positions_T = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])

    loss_sum, count = model(Stream(TOKENS_T, positions_T), Packed.of([5, 3]), Loss(targets_T))

    alone, _ = model(Stream(TOKENS_T[:5], positions_T[:5]), Packed.of([5]), Loss(targets_T[:5]))
    other, _ = model(Stream(TOKENS_T[5:], positions_T[5:]), Packed.of([3]), Loss(targets_T[5:]))
    torch.testing.assert_close(loss_sum, alone + other)
    assert count == 6


@torch.no_grad()
def test_4_the_same_line_reads_a_prompt_and_decodes() -> None:
    """With another ``attend``, keys and values come from a paged cache; the model is unchanged.

    Seven tokens are prefilled, the eighth is decoded; its logits equal those of one pass over all eight."""
    model = tiny()
    cache = KVCache(TINY, SOLO_AXES, pages=3, page_tokens=4, dtype=torch.float64)
    pages_RP = torch.tensor([[2, 0]], dtype=torch.int32)  # this request's first tokens are in page 2, the next in 0
    slots_T = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])

    def extend(start: int, stop: int) -> torch.Tensor:
        """Process tokens start … stop − 1 into the cache; return the last one's logits."""
        new = torch.tensor([0, stop - start], dtype=torch.int32)
        length = torch.tensor([stop], dtype=torch.int32)
        attend = Paged(cache, pages_RP, slots_T[start:stop], new, length, stop - start, stop)
        return model(
            Stream(TOKENS_T[start:stop], POSITIONS_T[start:stop]), attend, Rows(torch.tensor([stop - start - 1]))
        )

    extend(0, 7)
    whole = model(Stream(TOKENS_T, POSITIONS_T), Packed.of([8]), Rows(torch.tensor([7])))
    torch.testing.assert_close(extend(7, 8), whole)


def test_5_a_layout_is_data() -> None:
    """A table gives the dimension in which each parameter is sharded; a plan gives the ranks.

    An impossible plan is refused before any process starts."""
    layout = layout_of(tiny())
    assert (layout["blocks.0.ffn.up.weight"], layout["blocks.0.ffn.down.weight"]) == (0, 1)  # columns, then rows
    with pytest.raises(PlanError, match="2 key/value heads cannot be divided over tp=4; use tp of 1 or 2"):
        Plan(tp=4).check(TINY)


def _loss_and_gradients(plan: Plan) -> tuple[float, dict]:
    with DistributedContext.build(plan, "cpu") as context:
        model = tiny(context.axes)
        loss_sum, _ = model(Stream(TOKENS_T[:-1], POSITIONS_T[:-1]), Packed.of([7]), Loss(TOKENS_T[1:]))
        loss_sum.backward()
        return loss_sum.item(), {name: p.grad for name, p in model.named_parameters()}


def test_6_two_processes_compute_what_one_does() -> None:
    """Tensor parallelism does not change the results: loss and gradients agree to 1e-10.

    Heads, hidden units (25 of 50 each) and the vocabulary are split over real processes."""
    shares = in_processes(2, _loss_and_gradients, Plan(tp=2))
    loss, gradients = _loss_and_gradients(Plan())
    layout = layout_of(tiny())
    for rank, (loss_of_rank, of_rank) in enumerate(shares):
        assert abs(loss_of_rank - loss) < 1e-10
        axes = Axes(tp=Axis("tp", size=2, rank=rank))
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_rank[name], local_part(gradient, layout[name], axes), rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short documents, a tokenizer trained on them, and the tokens."""
    folder = tmp_path_factory.mktemp("tour") / "corpus"
    documents = [
        (f"note {i}", f"Note {i}: the columns of a colonnade carry what is above them. " * 6) for i in range(40)
    ]
    build(documents, folder, vocab_size=300, validation_share=0.2)
    return folder


def test_7_text_becomes_tokens(corpus: Path) -> None:
    """A corpus is a folder: a tokenizer, memory-mapped tokens, where each document ends, and checksums.

    Whether a document is in the validation split depends on its text alone; decoding restores the text."""
    read = Corpus(corpus, verify=True)
    train, held_out = read.split("train"), read.split("validation")
    assert train.documents + held_out.documents == 40
    text = read.tokenizer.decode(train.document(0).tolist())
    assert "the columns of a colonnade carry what is above them." in text


def settings(corpus: Path, runs: Path, steps: int) -> RunConfig:
    """Config of a run that takes a few seconds."""
    train = TrainConfig(steps=steps, batch=4, lr=1e-2, schedule="constant", warmup=2, eval_every=0)
    return RunConfig(runs=runs, device="cpu", model=TINY, data=DataConfig(path=corpus, sequence=64), train=train)


def test_8_training_resumes_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Five steps, a restart and five more give bitwise the result of ten steps.

    The whole state is the step, the weights, both moments and one number for the data."""
    straight = Trainer(settings(corpus, tmp_path / "straight", 10)).fit()
    Trainer(settings(corpus, tmp_path / "stopped", 5)).fit()
    resumed = Trainer(settings(corpus, tmp_path / "stopped", 10)).fit()

    assert resumed.loss == straight.loss
    one, other = (colonnade.load(summary.checkpoint).transformer.state_dict() for summary in (straight, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def _save_a_share(folder: Path) -> None:
    with DistributedContext.build(Plan(tp=2), "cpu") as context:
        native.save(folder, tiny(context.axes), native.Meta(model=TINY), context)


def test_9_one_checkpoint_loads_under_any_layout_and_leaves_as_hugging_face(tmp_path: Path) -> None:
    """Saved by two processes, loaded by one, exported for ``transformers``, loaded again: the same logits.

    The folder is written atomically, and nothing in it is ever unpickled."""
    in_processes(2, _save_a_share, tmp_path / "ours")
    ours = colonnade.load(tmp_path / "ours", dtype="float64")
    colonnade.save(ours, tmp_path / "theirs", format="hf")
    theirs = colonnade.load(tmp_path / "theirs", dtype="float64")

    expected_TV = tiny()(Stream(TOKENS_T, POSITIONS_T), Packed.of([8]), Rows())
    assert torch.equal(ours.logits(TOKENS_T), expected_TV)
    assert torch.equal(theirs.logits(TOKENS_T), expected_TV)


@pytest.mark.slow
@pytest.mark.exec
def test_10_real_weights_answer_over_http() -> None:
    """``colonnade serve`` implements OpenAI's API: the openai client streams text from SmolLM2.

    The server picks a free port and prints its address; Ctrl-C stops it."""
    command = [sys.executable, "-m", "colonnade", "serve", "smollm2", "--serve.port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = (word for line in server.stderr for word in line.split())
            url = next(word for word in said if word.startswith("http://"))
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            pieces = client.completions.create(
                model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
            )
            assert "".join(piece.choices[0].text for piece in pieces).startswith(" Paris")
        finally:
            server.terminate()
    assert server.returncode == 0
