"""Expert kernels run by Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.interpreted_experts``.

Tiles are small, so that experts have several or none. The checks alternate between one program per tile and
persistent programs, pointers and tensor descriptors, fused and prior gathering, and torch's grouped GEMM per product.
"""

import itertools
import warnings
from typing import get_args

import torch
from torch import Tensor

from colonnade.kernels import permute, routing, triton_permute, triton_routing, triton_sort
from colonnade.kernels.experts import reference, tiles, triton_experts, triton_few_tokens
from colonnade.kernels.experts.deferred_wgrad import DeferredWgrad
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.experts.tiles import GroupedTiles, Kernel
from tests.experts import LOADS, Case, gradients, routed_experts, routed_in_parts
from tests.pairwise import pairwise
from tests.routers import CHOICES, hard_scores, same_choice

HOW = [
    GroupedTiles(16, 16, 16, 4, 2, GROUP=2),
    GroupedTiles(16, 32, 16, 4, 2, GROUP=1, programs_per_sm=1),
    GroupedTiles(32, 16, 32, 4, 2, descriptors=True),
    GroupedTiles(32, 32, 16, 4, 2, descriptors=True, gather_first=True, interleaved=True),
    GroupedTiles(16, 16, 32, 4, 2, gather_first=True, interleaved=True),
]
LIBRARY = GroupedTiles(16, 16, 16, 4, 2, library=True)
SHAPES = [(23, 2, 5, 24, 20), (9, 3, 8, 32, 48), (5, 2, 4, 17, 33), (1, 2, 4, 16, 16)]
ACTIVATIONS = list(reference.ACTIVATIONS)


def same(run, case: Case, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5) -> None:
    """Compare values and gradients with float64 by norm (relative above 1)."""
    exact = gradients(routed_experts(reference.routed), case, torch.float64, values=dtype)
    for name, got in gradients(run, case, dtype).items():
        error = float((got.double() - exact[name]).norm() / exact[name].norm().clamp(min=1))
        assert error < tolerance, (case, name, error)


def force_tiles(how: GroupedTiles) -> None:
    """Use this tiling for every kernel."""
    tiles.OVERRIDES.update(dict.fromkeys(get_args(Kernel), how))


def check_experts() -> int:
    """Whole MoE layers: every load and shape, every tiling with two shapes.

    Rows of choices are both searched and given.
    """
    count, searched = 0, triton_permute.SEARCH_ROWS
    for i, load in enumerate(LOADS):
        shape, triton_permute.SEARCH_ROWS = SHAPES[i % 2], searched * (i % 2)
        force_tiles(HOW[i % 5])
        gated, biased = i % 4 != 1, i % 3 == 1
        same(
            routed_experts(triton_experts.routed),
            Case(*shape, load=load, gated=gated, biased=biased, activation=ACTIVATIONS[i % 4]),
        )
        count += 1
    triton_permute.SEARCH_ROWS = searched
    for load in ("even", "some dropped"):  # one token: each row is its own tile
        same(routed_experts(triton_experts.routed), Case(1, 3, 5, 16, 24, load, biased=load == "even"))
        count += 1
    one = torch.tensor([[2, 5, 0]])  # one of whose choices was dropped
    x, routing, *stacks = Case(1, 3, 5, 16, 24).leaves(torch.float32, "cpu")
    weights = reference.Weights(*stacks)  # type: ignore[arg-type]
    found = [
        run(x, *permute.sort(one, 5), routing, weights, "silu")  # type: ignore[arg-type]
        for run in (triton_experts.routed, reference.routed)
    ]
    assert torch.allclose(*found, atol=1e-5)
    for shape in (*SHAPES[2:], (0, 2, 4, 16, 16)):
        same(routed_experts(triton_experts.routed), Case(*shape, biased=True, activation="gelu"))
        count += 1
    same(routed_experts(triton_experts.routed), Case(*SHAPES[1]), torch.float16, 2e-3)
    return count + 1


def check_mixtures() -> int:
    """torch's grouped GEMM for each product, and for all; not used with biases or odd widths."""
    mixtures = [{kernel} for kernel in get_args(Kernel)] + [set(get_args(Kernel))]
    for i, by_library in enumerate(mixtures):
        force_tiles(HOW[i % 5])
        tiles.OVERRIDES.update(dict.fromkeys(by_library, LIBRARY))
        gated = not by_library & {"up"} or len(by_library) > 1
        same(routed_experts(triton_experts.routed), Case(7, 2, 4, 16, 20, load=LOADS[i % 6], gated=gated))
    for i, load in enumerate(LOADS):
        force_tiles(LIBRARY)
        activation = ACTIVATIONS[i % 4]
        same(routed_experts(triton_experts.routed), Case(9, 2, 5, 16, 20, load, gated=i % 2 > 0, activation=activation))
    same(routed_experts(triton_experts.routed), Case(5, 2, 4, 24, 20, biased=True))
    same(routed_experts(triton_experts.routed), Case(5, 2, 4, 17, 33, load="skewed"))
    return len(mixtures) + len(LOADS) + 2


def check_few_tokens() -> int:
    """The few-token kernel: no expert, one expert, biases, odd widths, several steps.

    Also with each token's second expert on another rank.
    """
    triton_few_tokens.UP_TILES.update(BN=8, BK=64)
    triton_few_tokens.DOWN_TILES.update(BF=32)
    cases = [
        Case(1, 2, 4, 32, 24), Case(1, 8, 16, 64, 40, biased=True), Case(4, 8, 16, 80, 16, "one"),
        Case(3, 2, 5, 48, 33, "some dropped", gated=False, biased=True, activation="gelu"),
        Case(2, 1, 3, 20, 7, "all dropped", biased=True), Case(1, 1, 1, 130, 70, gated=False, activation="relu"),
        Case(0, 2, 4, 16, 16), Case(1, 2, 4, 150, 40, biased=True), Case(2, 2, 4, 24, 100),
    ]  # fmt: skip
    for case in cases:
        x, routing, *stacks = (None if it is None else it.detach() for it in case.leaves(torch.float32, "cpu"))
        weights, ids = Weights(*stacks), case.ids()
        for there in (ids, torch.where(torch.arange(case.A) % 2 == 1, case.E, ids)):
            got = triton_few_tokens.routed_unsorted(x, there, routing, weights, case.activation)
            exact = reference.routed_unsorted(
                x.double(), there, routing.double(), weights.map(Tensor.double), case.activation
            )
            assert got.shape == exact.shape
            assert (got.double() - exact).norm() <= 1e-6 * exact.norm(), case
    return 2 * len(cases)


def check_deferred_wgrad() -> int:
    """Deferred weight gradients over several calls: also without rows, and when not requested."""
    for i, load in enumerate(LOADS[1::2]):
        force_tiles(HOW[i + 1])
        same(
            routed_in_parts(triton_experts.routed_deferred),
            Case(*SHAPES[3 - i], load=load, gated=i != 1, biased=i == 2, activation=ACTIVATIONS[i]),
        )
    case = Case(*SHAPES[2], biased=True)
    x, routing, *stacks = case.leaves(torch.float32, "cpu")
    frozen = [None if w is None else w.detach() for w in stacks]
    order_R, ends_E = permute.sort(case.ids(), case.E)
    exact, *_ = torch.autograd.grad(
        triton_experts.routed(x, order_R, ends_E, routing, reference.Weights(*stacks), "silu").sum(), [x]
    )
    for weights, leaves in ((frozen, [x]), (stacks, [x])):
        later = DeferredWgrad(reference.Weights(*weights))
        y = triton_experts.routed_deferred(x, order_R, ends_E, routing, later, "silu")
        (dx,) = torch.autograd.grad(y.sum(), leaves)
        assert torch.equal(dx, exact)
    leaves = [w for w in stacks if w is not None]
    whole = torch.autograd.grad(
        triton_experts.routed(x, order_R, ends_E, routing, reference.Weights(*stacks), "silu").sum(), leaves
    )
    later = DeferredWgrad(reference.Weights(*stacks))
    total = triton_experts.routed_deferred(x, order_R, ends_E, routing, later, "silu").sum()
    torch.autograd.grad(total, [x], retain_graph=True)  # input gradients first, as in a zero-bubble pipeline
    assert all(map(torch.equal, torch.autograd.grad(total, leaves), whole))
    with torch.no_grad():
        later = DeferredWgrad(reference.Weights(*stacks))
        again = triton_experts.routed_deferred(x, order_R, ends_E, routing, later, "silu")
    assert torch.equal(again, y)
    return 6


def check_bits() -> int:
    """Deterministic, and different tilings agree closely."""
    case = Case(*SHAPES[0], load="skewed")
    found = []
    for how in (HOW[0], HOW[0], HOW[1]):
        force_tiles(how)
        found.append(gradients(routed_experts(triton_experts.routed), case, torch.float32))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all((found[0][name] - found[2][name]).abs().max() < 1e-5 for name in found[0])
    return 2


def check_sort() -> int:
    """Order, ends and positions equal the reference's with both counting kernels.

    Many tokens, and none or one, each with every two of: choices, experts, dropped ones, a way of counting.
    """
    count, few, programs = 0, triton_sort.SMALL, triton_sort.PROGRAMS
    draw = torch.Generator().manual_seed(0)
    # (whether rows are bounded, SMALL, PROGRAMS): counted by programs of one block each and of several.
    ways = (False, few, programs), (True, 0, programs), (False, 0, 3)
    others = (1, 3), (1, 5, 64, 200), (False, True), ways
    for T, A, E, none, way in (*((100, *row) for row in pairwise(*others)), *pairwise((0, 1), *others)):
        ids = torch.randint(E + none, (T, A), generator=draw)
        bounded, triton_sort.SMALL, triton_sort.PROGRAMS = way
        rows = T * A // 2 if bounded else None
        for got, exact in zip(triton_sort.sort(ids, E, rows), permute.sort(ids, E, rows), strict=True):
            assert torch.equal(got, exact), (T, A, E, none, way)
        places = (run(ids, E)[ids < E] for run in (triton_sort.positions, permute.positions))
        assert torch.equal(*places), (T, A, E, none, way)
        count += 1
    triton_sort.SMALL, triton_sort.PROGRAMS = few, programs
    ids = torch.randint(7, (520, 2), generator=draw)  # needs more than one comparison step
    comparisons, triton_sort.COMPARISONS = triton_sort.COMPARISONS, 4 * triton_sort.COMPARISONS  # fewer programs
    assert all(map(torch.equal, triton_sort.sort(ids, 6), permute.sort(ids, 6)))
    triton_sort.COMPARISONS = comparisons
    return count + 1


def check_counts() -> int:
    """Counts equal the reference's: more choices than one program takes, none, and dropped ones."""
    draw = torch.Generator().manual_seed(0)
    cases = (0, 1, 4), (1, 1, 1), (300, 4, 5), (17, 3, 64), (40, 40, 40), (9, 2, 600)
    for T, A, E in cases:
        ids = torch.randint(E + 3, (T, A), generator=draw)
        for some in (ids, ids[:, :1], torch.full_like(ids, E)):
            assert torch.equal(triton_sort.count(some, E), permute.count(some, E)), (T, A, E)
    return len(cases)


def check_choice() -> int:
    """Values and gradients equal the reference's; experts are distinct for any scores."""
    count = 0
    for (T, E, A), normalise in itertools.product(CHOICES, (False, True)):
        for name, scores in hard_scores(T, E).items():
            if T > 100 and name != "normal":
                continue
            same_choice(
                triton_routing.top_experts,
                routing.top_experts,
                scores,
                A,
                normalise=normalise,
                scale=1 + 1.5 * normalise,
            )
            count += 1
    logits = torch.randn(5, 12)  # the compared scores are a slice, different from the scores that count
    for got, exact in zip(
        triton_routing.top_experts(logits[:, 1:7], logits.T[:6].T, 3, normalise=True, scale=1.0),
        routing.top_experts(logits[:, 1:7], logits.T[:6].T, 3, normalise=True, scale=1.0),
        strict=True,
    ):
        assert torch.allclose(got, exact)
    return count + 1


def check_gather_and_combine() -> int:
    """Gather and combine with gradients; also sliced rows and fewer rows than choices.

    Rows of choices are both searched and given.
    """
    count = 0
    draw = torch.Generator().manual_seed(0)
    shapes = ((13, 2, 1100, None), (5, 3, 7, 9), (1, 1, 1, None), (0, 2, 4, None), (4, 2, 8, 0))
    for (T, A, D, rows), searched in itertools.product(shapes, (triton_permute.SEARCH_ROWS, 0)):
        triton_permute.SEARCH_ROWS = searched
        order_R = torch.randperm(T * A, generator=draw)[:rows]
        wide = torch.randn(max(T, T * A), D + 3, generator=draw)
        weights, R = torch.rand(T, A, generator=draw), len(order_R)
        results = []
        for module in (triton_permute, permute):
            x, y, w = (t.detach().clone().requires_grad_() for t in (wide[:T], wide[:R], weights))
            got = module.gather(x[:, 1 : D + 1], order_R, A)
            back = module.combine(y[:, 2 : D + 2], order_R, w)
            torch.autograd.backward([got, back], [wide[:R, :D].clone(), wide[:T, 3:].clone()])
            zeros = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, y, w)]
            results.append((got, back, *zeros))
        for ours, exact in zip(*results, strict=True):
            assert torch.allclose(ours, exact, atol=1e-6, rtol=1e-5), (T, A, D, rows)
        count += 1
    return count


def check_operators() -> int:
    """Custom operators for torch.compile: schemas, fake tensors, autograd registration."""
    force_tiles(HOW[0])
    case = Case(4, 2, 3, 16, 16, biased=True)
    x, routing, *stacks = case.leaves(torch.float32, "cpu")
    order_R, ends_E = permute.sort(case.ids(), case.E)
    operators = torch.ops.colonnade
    torch.library.opcheck(operators.experts.default, (x, order_R, ends_E, routing, *stacks, "silu", True))
    given = [None if it is None else it.detach() for it in (x, routing, *stacks)]
    torch.library.opcheck(operators.few_experts.default, (given[0], case.ids(), *given[1:], "silu"))
    torch.library.opcheck(operators.sort_by_expert.default, (case.ids(), case.E))
    torch.library.opcheck(operators.count_by_expert.default, (case.ids(), case.E))
    torch.library.opcheck(operators.queue_positions.default, (case.ids(), case.E))
    scores = torch.rand(5, 6, requires_grad=True)
    for normalise in (False, True):
        torch.library.opcheck(operators.top_experts.default, (scores.detach(), scores, 2, normalise, 2.5))
    torch.library.opcheck(operators.gather_rows.default, (x, order_R, 2))
    y = torch.randn(8, 16, requires_grad=True)
    torch.library.opcheck(operators.combine_rows.default, (y, order_R, routing, 4, 2))
    return 9


if __name__ == "__main__":
    warnings.simplefilter("error")
    # Unwritten rows after an expert's: whole tiles load and multiply them but must discard the results.
    warnings.filterwarnings("ignore", "(invalid value|overflow|divide by zero) encountered in matmul")
    checks = (
        check_experts,
        check_few_tokens,
        check_deferred_wgrad,
        check_mixtures,
        check_bits,
        check_sort,
        check_gather_and_combine,
    )
    for check in (*checks, check_counts, check_choice, check_operators):
        print(f"{check.__name__}: {check()} cases", flush=True)
