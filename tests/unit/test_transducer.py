"""The transducer's loss and searches, CTC alignment and prefix beam against enumeration of all paths."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from colonnade.config import Plan
from colonnade.config.speech import SpeechConfig
from colonnade.errors import ConfigError, DataError
from colonnade.kernels.ctc import align, greedy, prefix_beam
from colonnade.kernels.transducer import joint as joint_kernels
from colonnade.kernels.transducer.reference import transducer_loss
from colonnade.model.transducer_loss import Joint
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.speech.letter_lm import ORDER, Fusion, LetterModel
from colonnade.speech.predictor import LstmPredictor, StatelessPredictor
from colonnade.speech.search import BeamSearch, GreedySearch
from tests.worlds import assert_same, run

V, D = 5, 6
FRAMES, LABELS = [4, 1, 3, 2], [[1, 2, 1], [], [3], [4, 4, 2, 1]]


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors() -> list[torch.Tensor]:
    shapes = [(sum(FRAMES), D), (sum(len(x) + 1 for x in LABELS), D), (V, D), (V,)]
    return [torch.randn(shape, generator=rng(i), dtype=torch.float64) for i, shape in enumerate(shapes)]


def materialised(e, p, w, b) -> torch.Tensor:
    """The reference loss of each utterance from all log-probabilities."""
    losses, t, u = [], 0, 0
    for n, own in zip(FRAMES, LABELS, strict=True):
        h = torch.relu(e[t : t + n, None] + p[u : u + len(own) + 1])
        losses.append(transducer_loss((h @ w.T + b).log_softmax(-1), own, 0))
        t, u = t + n, u + len(own) + 1
    return torch.stack(losses)


def joint_of(w: torch.Tensor, b: torch.Tensor, tp=None) -> Joint:
    joint = Joint(D, V, dtype=torch.float64) if tp is None else Joint(D, V, tp=tp, dtype=torch.float64)
    start, stop = joint.tp.part(V)
    with torch.no_grad():
        joint.weight.copy_(w[start:stop])
        joint.bias.copy_(b[start:stop])
    return joint


def test_reference_equals_enumeration():
    logprobs = torch.randn(3, 3, V, generator=rng(9), dtype=torch.float64).log_softmax(-1)
    labels, total = [2, 1], 0.0
    # A path is an order of three blanks and two labels that ends in a blank.
    for places in itertools.combinations(range(4), 2):
        t = u = 0
        score = 0.0
        for i in range(5):
            if i in places:
                score += float(logprobs[t, u, labels[u]])
                u += 1
            else:
                score += float(logprobs[t, u, 0])
                t += 1
        total += math.exp(score)
    assert abs(float(transducer_loss(logprobs, labels, 0)) + math.log(total)) < 1e-12


@pytest.mark.parametrize("rows", [3, 4096])
def test_loss_and_gradients_equal_reference(rows, monkeypatch):
    monkeypatch.setattr("colonnade.kernels.transducer.joint.CHUNK_ROWS", rows)
    weights = torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=torch.float64)
    own, theirs = ([x.clone().requires_grad_() for x in tensors()] for _ in range(2))
    joint = joint_of(own[2], own[3])
    losses = joint.loss(own[0], own[1], FRAMES, LABELS)
    (losses * weights).sum().backward()
    reference = materialised(*theirs)
    (reference * weights).sum().backward()
    assert_same(losses, reference)
    for grad, x in zip((own[0].grad, own[1].grad, joint.weight.grad, joint.bias.grad), theirs, strict=True):
        assert_same(grad, x.grad)


def test_loss_passes_gradcheck():
    e, p, w, b = tensors()
    joint = joint_of(w, b)

    def loss(e, p, w, b):
        return torch.func.functional_call(_Loss(joint), {"joint.weight": w, "joint.bias": b}, (e, p))

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in (e, p, w, b)])


class _Loss(torch.nn.Module):
    def __init__(self, joint):
        super().__init__()
        self.joint = joint

    def forward(self, e, p):
        return self.joint.loss(e, p, FRAMES, LABELS)


def test_float32_loss_of_a_long_utterance():
    T, U = 300, 60
    e, p = torch.randn(T, D, generator=rng(1)), torch.randn(U + 1, D, generator=rng(2))
    w, b = torch.randn(V, D, generator=rng(3)), torch.zeros(V)
    labels = torch.randint(1, V, (U,), generator=rng(4)).tolist()
    small = Joint(D, V)
    with torch.no_grad():
        small.weight.copy_(w)
        small.bias.copy_(b)
    exact = joint_of(w.double(), b.double()).loss(e.double(), p.double(), [T], [labels])
    assert abs((small.loss(e, p, [T], [labels]) / exact - 1).item()) < 1e-6


def test_dead_cells_do_not_change_float32_gradients(monkeypatch):
    """Most cells of a sharp lattice are skipped; the gradients equal float64's. A NaN is never skipped."""
    T, U, seen = 60, 20, list[int]()
    shapes = ((T, D), (U + 1, D), (V, D), (V,))
    e, p, w, b = (4 * torch.randn(shape, generator=rng(i), dtype=torch.float64) for i, shape in enumerate(shapes))
    labels = torch.randint(1, V, (U,), generator=rng(4)).tolist()
    subtract = joint_kernels._subtract
    monkeypatch.setattr(joint_kernels, "_subtract", lambda dz, *x: (seen.append(len(dz)), subtract(dz, *x)))

    def gradients(dtype: torch.dtype, e: torch.Tensor) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (e, p, w, b)]
        joint = Joint(D, V, dtype=dtype)
        weights = {"joint.weight": inputs[2], "joint.bias": inputs[3]}
        loss = torch.func.functional_call(Sum(joint), weights, tuple(inputs[:2]))
        return list(torch.autograd.grad(loss, inputs))

    class Sum(_Loss):
        def forward(self, e, p):
            return self.joint.loss(e, p, [T], [labels]).sum()

    exact, found = gradients(torch.float64, e), gradients(torch.float32, e)
    assert seen[0] > T * (U + 1) * 0.9, "float64 leaves out cells"
    assert seen[2] < T * (U + 1) / 2, "few cells are dead, so nothing is tested"
    for x, y in zip(found, exact, strict=True):
        assert (x - y).norm() < 1e-6 * y.norm()
    bad = e.clone()
    bad[T // 2] = torch.nan
    assert all(bool(x.isnan().any()) for x in gradients(torch.float32, bad))


def _sharded(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        e, p, w, b = (x.requires_grad_() for x in tensors())
        joint = joint_of(w, b, context.axes.tp)
        losses = joint.loss(e, p, FRAMES, LABELS)
        losses.sum().backward()
        start, stop = context.axes.tp.part(V)
        theirs = [x.clone().requires_grad_() for x in tensors()]
        reference = materialised(*theirs)
        reference.sum().backward()
        assert_same(losses, reference)
        assert_same(e.grad, theirs[0].grad)
        assert_same(p.grad, theirs[1].grad)
        assert_same(joint.weight.grad, theirs[2].grad[start:stop])
        assert_same(joint.bias.grad, theirs[3].grad[start:stop])
        whole = joint_of(*(x.detach() for x in theirs[2:]))
        assert_same(joint.logprobs(e[:4], p[:4]), whole.logprobs(theirs[0][:4], theirs[1][:4]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_vocabulary_parallel_loss(world):
    """At 4 the last rank has no rows."""
    run(world, _sharded, world)


def test_loss_of_nothing():
    e, p, w, b = tensors()
    joint = joint_of(w, b)
    losses = joint.loss(e[:0].requires_grad_(), p[:0], [], [])
    losses.sum().backward()
    assert losses.shape == (0,)
    assert float(joint.weight.grad.abs().sum()) == 0


def test_loss_refuses_what_has_no_alignment():
    e, p, w, b = tensors()
    joint = joint_of(w, b)
    with pytest.raises(DataError, match="0 frames"):
        joint.loss(e[:0], p[:2], [0], [[1]])
    with pytest.raises(DataError, match=r"outside 0\.\.4"):
        joint.loss(e[:1], p[:2], [1], [[5]])
    with pytest.raises(DataError, match="add up to 3"):
        joint.loss(e[:1], p[:2], [3], [[1]])


@pytest.mark.parametrize("kind", [StatelessPredictor, LstmPredictor])
def test_predictor_steps_equal_whole_sequences(kind):
    torch.manual_seed(0)
    predictor = kind(4, V, D).double()
    whole = predictor(LABELS)
    longest, row, states = max(map(len, LABELS)), 0, predictor.start(len(LABELS))
    steps = []
    for u in range(longest + 1):
        label = torch.tensor([([0, *own] + [0] * longest)[u] for own in LABELS])
        p, states = predictor.step(label, states)
        steps.append(p)
    for i, own in enumerate(LABELS):
        for u in range(len(own) + 1):
            assert_same(whole[row], steps[u][i])
            row += 1


@pytest.fixture(params=[StatelessPredictor, LstmPredictor])
def searched(request):
    """A predictor, a joint network with sharp outputs, and frames of three streams."""
    torch.manual_seed(3)
    predictor = request.param(4, V, D).double().requires_grad_(False)
    w = 2 * torch.randn(V, D, generator=rng(5), dtype=torch.float64)
    joint = joint_of(w, torch.randn(V, generator=rng(6), dtype=torch.float64)).requires_grad_(False)
    frames = [2 * torch.randn(n, D, generator=rng(7 + n), dtype=torch.float64) for n in (9, 0, 6)]
    return predictor, joint, frames


def test_greedy_takes_the_best_label_and_any_segments_give_the_same(searched):
    predictor, joint, frames = searched
    whole = GreedySearch(predictor, joint.logprobs, 3).push(frames)
    for stream, own in enumerate(frames):
        labels: list[int] = []
        expected = []
        for t in range(len(own)):
            for _ in range(5):
                p = predictor([labels])[-1:]
                label = int(joint.logprobs(own[t : t + 1], p).argmax())
                if label == 0:
                    break
                labels.append(label)
                expected.append((t, label))
        assert whole[stream] == expected
    assert sum(map(len, whole)) > 3, "nothing was emitted, so nothing was compared"
    search = GreedySearch(predictor, joint.logprobs, 3)
    pieces = [search.push([x[a : a + 2] for x in frames]) for a in range(0, 9, 2)]
    assert [[pair for piece in pieces for pair in piece[r]] for r in range(3)] == whole


def test_wide_beam_equals_enumeration(searched):
    """Scores are log p(labels): minus the loss, where labels a frame are not limited below U."""
    predictor, joint, frames = searched
    own = frames[0][:2]
    search = BeamSearch(predictor, joint.logprobs, 1, beam=500, max_labels=2)
    search.push([own])
    scores = {h.labels: h.score for h in search.hypotheses[0]}
    for n in range(3):
        for labels in itertools.product(range(1, V), repeat=n):
            loss = joint.loss(own, predictor([labels]), [2], [labels])
            assert abs(scores[labels] + loss.item()) < 1e-10


def test_letter_probabilities_are_those_of_counted_ngrams(monkeypatch):
    """Of every context in a text and of some that are not in it, by the definition."""
    config, texts = SpeechConfig(letters="ab "), ["ab abba", "", "bab ab", "a" * 20]
    model = LetterModel(config, texts)
    stream = [label for text in texts if text for label in (0, *config.labels(text))] + [0] * ORDER

    def probability(label: int, context: tuple[int, ...]) -> float:
        n, longest = len(context), len(stream) - ORDER
        after = [stream[i + n] for i in range(longest) if tuple(stream[i : i + n]) == context]
        shorter = probability(label, context[1:]) if context else 1 / 4
        return (after.count(label) + len(set(after)) * shorter) / (len(after) + len(set(after))) if after else shorter

    contexts = {tuple(stream[i : i + n]) for i in range(40) for n in range(ORDER)} | {(3, 3), (0, 3, 1)}
    for context in contexts:
        expected = [probability(label, context) for label in range(4)]
        assert np.abs(model.probabilities(context) - expected).max() < 1e-12
        assert abs(model.probabilities((2, 1, *context, *context, *context)).sum() - 1) < 1e-12
    monkeypatch.setattr("colonnade.speech.letter_lm.CACHED", 1)
    again = pickle.loads(pickle.dumps(model))
    for context in contexts:
        assert np.array_equal(again.probabilities(context), model.probabilities(context))
    long = tuple([1] * 30)
    assert np.array_equal(model.probabilities(long), model.probabilities(long[: ORDER - 1]))
    with pytest.raises(DataError, match="needs text"):
        LetterModel(config, [""])
    with pytest.raises(ConfigError, match="at most 31 letters"):
        LetterModel(config.replace(pieces=("▁a", "b")), texts)


@pytest.mark.parametrize("cut", [1, 9])
def test_wide_beam_with_a_language_model_equals_enumeration(searched, cut):
    """Scores are log p(labels) and the weighted log-probabilities of the labels, also after a final label."""
    predictor, joint, frames = searched
    config = SpeechConfig(letters="abcd")
    models = LetterModel(config, ["abcd", "dab", "bcbc"]), LetterModel(config, ["ddd"])
    own = frames[0][:2]
    search = BeamSearch(
        predictor, joint.logprobs, 1, beam=500, max_labels=2, fusion=Fusion(models, 0.7, (0.8, 0.2), 0.3)
    )
    for part in own.split(cut):
        search.push([part])
    scores = {h.labels: h.score for h in search.hypotheses[0]}
    for n in range(3):
        for labels in itertools.product(range(1, V), repeat=n):
            loss = joint.loss(own, predictor([labels]), [2], [labels])
            each = [[m.probabilities((0, *labels[:i]))[labels[i]] for m in models] for i in range(n)]
            letters = sum(math.log(0.8 * a + 0.2 * b) for a, b in each)
            assert abs(scores[labels] + loss.item() - 0.7 * letters - 0.3 * n) < 1e-10


def test_beam_of_one_stream_equals_the_beam_among_others(searched):
    predictor, joint, frames = searched
    together = BeamSearch(predictor, joint.logprobs, 3, beam=4)
    for a in range(0, 9, 4):
        together.push([x[a : a + 4] for x in frames])
    for r, own in enumerate(frames):
        alone = BeamSearch(predictor, joint.logprobs, 1, beam=4)
        alone.push([own])
        pairs = zip(alone.best(0), together.best(r), strict=True)
        assert all(a.labels == b.labels and abs(a.score - b.score) < 1e-10 for a, b in pairs)
    assert together.best(1)[0].labels == ()
    stable = together.stable(0)
    assert all(h.labels[: len(stable)] == stable for h in together.hypotheses[0])


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_deltas_of_a_beam_are_the_best_hypothesis(searched, cut, monkeypatch):
    """However the frames are cut, they are the labels of a search that takes no final labels off its hypotheses."""
    predictor, joint, frames = searched
    with monkeypatch.context() as patch:
        patch.setattr(BeamSearch, "_commit", lambda *_: None)
        whole = BeamSearch(predictor, joint.logprobs, 3, beam=4)
        whole.push(frames)
    assert len(whole.best(0)[0].labels) > 3, "nothing was said, so nothing is compared"
    search = BeamSearch(predictor, joint.logprobs, 3, beam=4)
    for _ in range(2):  # the second time in slots that have been used
        found: list[list[int]] = [[], [], []]
        for a in range(0, 9, cut):
            for r, new in enumerate(search.deltas([x[a : a + cut] for x in frames])):
                found[r] += new
            for r, own in enumerate(found):
                labels = [h.labels for h in search.hypotheses[r]]
                assert len(set(labels)) == len(labels), "equal hypotheses were not merged"
                assert search.stable(r) == (), "a label on which all agree was kept"
                assert search.committed[r] == len(own)
        for r, own in enumerate(found):
            best = whole.best(r)[0]
            assert (*own, *search.finish(r)) == best.labels
            assert abs(search.best(r)[0].score - best.score) < 1e-10
            search.reset(r)


def test_hypotheses_that_disagree_for_long_are_decided(searched, monkeypatch):
    """The labels that differ are bounded, however long the stream is; all cuts give the same text."""
    predictor, joint, _ = searched
    monkeypatch.setattr("colonnade.speech.search.MAX_OPEN_LABELS", 5)
    frames = 0.1 * torch.randn(60, D, generator=rng(8), dtype=torch.float64)
    texts = []
    for cut in (1, 7, 60):
        search, found = BeamSearch(predictor, joint.logprobs, 1, beam=6), list[int]()
        for piece in frames.split(cut):
            found += search.deltas([piece])[0]
            assert max(len(h.labels) for h in search.hypotheses[0]) <= 5
        assert len(found) > 5, "nothing was decided"
        texts.append(found + search.finish(0))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_skipped_blanks_are_those_of_a_certain_blank(T, seed):
    """Enumeration over frames whose p(blank) > 0.95 is replaced by 1: all labels and scores are equal."""
    logits = torch.randn(T, 3, generator=rng(20 + seed), dtype=torch.float64)
    logits[seed % T, 0] += 8.0
    logprobs = logits.log_softmax(-1)
    certain = logprobs[:, 0] > math.log(0.95)
    assert bool(certain.any()), "no frame is skipped, so nothing is tested"
    replaced = logprobs.clone()
    replaced[certain] = -torch.inf
    replaced[certain, 0] = 0.0
    totals: dict[tuple[int, ...], float] = {}
    for path, score in path_scores(replaced):
        totals[collapse(path)] = totals.get(collapse(path), 0.0) + math.exp(score)
    found = dict(prefix_beam(logprobs, beam=300))
    for labels, total in totals.items():
        assert abs(math.exp(found.get(labels, -math.inf)) - total) < 1e-12
    assert set(found) == {labels for labels, total in totals.items() if total}


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label != 0)


def path_scores(logprobs: torch.Tensor):
    T, size = logprobs.shape
    for path in itertools.product(range(size), repeat=T):
        yield path, float(sum(logprobs[t, v] for t, v in enumerate(path)))


@pytest.mark.parametrize("labels", [(1,), (1, 1), (2, 1), (1, 2, 1), (2, 2, 1)])
def test_alignment_is_the_best_path(labels):
    logprobs = torch.randn(5, 3, generator=rng(11), dtype=torch.float64).log_softmax(-1)
    best = max((x for x in path_scores(logprobs) if collapse(x[0]) == labels), key=lambda x: x[1])[0]
    expected = [list(g) for label, g in itertools.groupby(enumerate(best), key=lambda x: x[1]) if label != 0]
    spans = align(logprobs, labels)
    assert [(s.start, s.stop) for s in spans] == [(g[0][0], g[-1][0] + 1) for g in expected]
    for span, label in zip(spans, labels, strict=True):
        assert abs(span.score - float(logprobs[span.start : span.stop, label].exp().mean())) < 1e-12


def test_alignment_of_no_labels_and_what_it_refuses():
    logprobs = torch.zeros(3, 4).log_softmax(-1)
    assert align(logprobs, []) == []
    assert [s[:2] for s in align(logprobs[:1], [2])] == [(0, 1)]
    with pytest.raises(DataError, match="3 labels and 1 repeats"):
        align(logprobs, [1, 1, 2])
    with pytest.raises(DataError, match=r"0\.\.3"):
        align(logprobs, [4])
    with pytest.raises(DataError, match="probability 0"):
        align(torch.full((3, 4), -torch.inf), [1])


def test_wide_prefix_beam_equals_enumeration():
    logprobs = torch.randn(5, 3, generator=rng(12), dtype=torch.float64).log_softmax(-1)
    totals: dict[tuple[int, ...], float] = {}
    for path, score in path_scores(logprobs):
        totals[collapse(path)] = totals.get(collapse(path), 0.0) + math.exp(score)
    found = prefix_beam(logprobs, beam=300, skip_blank=1)
    assert {labels for labels, _ in found} == set(totals)
    assert all(abs(math.exp(score) - totals[labels]) < 1e-12 for labels, score in found)
    assert [s for _, s in found] == sorted((s for _, s in found), reverse=True)
    assert prefix_beam(logprobs[:0]) == [((), 0.0)]


def test_certain_blanks_are_skipped_and_still_part_repeats():
    sharp = torch.full((3, 3), -50.0)
    sharp[0, 1] = sharp[1, 0] = sharp[2, 1] = 0.0
    assert prefix_beam(sharp.log_softmax(-1), beam=2)[0][0] == (1, 1)
    assert greedy(sharp) == [1, 1]
    assert greedy(sharp[:0]) == []
