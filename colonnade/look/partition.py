"""Block counts of a partitioned expression, and the rank of each block under a Plan; as in viewer/src/partition.ts.

i passes down left children and j down right children, and a node's k is its left child's j and its right child's i:
with k split over tensor-parallel ranks this is Megatron's column-then-row split (arXiv 1909.08053, section 3).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from colonnade.config import Plan
from colonnade.look.expression import Leaf, Tree, products

Letters = tuple[str, str]
"""The letters of a matrix's rows and columns (docs/alphabet.md)."""


def propagate(trees: Sequence[Tree], nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """(blocks of rows, blocks of columns) of each leaf by name and product by key, from the nodes' counts i, j, k."""
    found: dict[str, tuple[int, int]] = {}

    def visit(tree: Tree, rows: int, cols: int) -> None:
        if isinstance(tree, Leaf):
            known = found.get(tree.name, (1, 1))
            found[tree.name] = max(known[0], rows), max(known[1], cols)
            return
        own = nodes.get(tree.key, {})
        i, j, k = max(rows, own.get("i", 1)), max(cols, own.get("j", 1)), own.get("k", 1)
        found[tree.key] = i, j
        visit(tree.left, i, k)
        visit(tree.right, k, j)

    for tree in trees:
        visit(tree, 1, 1)
    return found


class Owner(NamedTuple):
    """Block (r, c) of a matrix is on rank r · row_stride + c · col_stride, and on ``copies`` ranks in all."""

    blocks: tuple[int, int]
    row_stride: int
    col_stride: int
    copies: int


def _split(letter: str, plan: Plan) -> tuple[int, int]:
    """(shares, distance of the ranks of two neighbouring shares) of a dimension; tp is innermost."""
    match letter:
        case "B":  # sequences
            return plan.data_ranks, plan.cp * plan.tp
        case "T" | "S":  # queries and keys of one sequence
            return plan.cp, plan.tp
        case "F" | "N" | "K" | "V":
            return plan.tp, 1
        case "E":  # whole experts; ep ranks lie over the stage's
            return plan.ep, 1
        case _:
            return 1, 1


def owner_of(letters: Letters, plan: Plan) -> Owner:
    """The ranks that own each block of a matrix; a mesh axis splits a matrix at most once."""
    rows, row_stride = _split(letters[0], plan)
    cols, col_stride = _split(letters[1], plan)
    if rows > 1 and row_stride == col_stride:
        cols, col_stride = 1, 1
    return Owner((rows, cols), row_stride, col_stride, max(1, plan.stage_ranks // (rows * cols)))


def owners(trees: Sequence[Tree], letters: Mapping[str, Letters], plan: Plan) -> dict[str, Owner]:
    """The owner of each face; a product has the letters of its arguments."""
    found: dict[str, Owner] = {}

    def letters_of(tree: Tree) -> Letters:
        if isinstance(tree, Leaf):
            return letters.get(tree.name, ("", ""))
        return letters_of(tree.left)[0], letters_of(tree.right)[1]

    def visit(tree: Tree) -> None:
        found[tree.name if isinstance(tree, Leaf) else tree.key] = owner_of(letters_of(tree), plan)
        if not isinstance(tree, Leaf):
            visit(tree.left)
            visit(tree.right)

    for tree in trees:
        visit(tree)
    return found


def summed(trees: Sequence[Tree], letters: Mapping[str, Letters], plan: Plan) -> dict[str, int]:
    """Products whose k is split over ranks, which sum their partial results; with the number of ranks."""

    def letter(tree: Tree, side: int) -> str:
        if isinstance(tree, Leaf):
            return letters.get(tree.name, ("", ""))[side]
        return letter(tree.right if side else tree.left, side)

    found: dict[str, int] = {}
    for node in (node for tree in trees for node in products(tree)):
        (rows, row_stride), (count, stride) = (_split(letter(node.left, side), plan) for side in (0, 1))
        # Rows split over the same ranks use all of k: keys and values travel round the ring.
        if count > 1 and not (rows > 1 and row_stride == stride):
            found[node.key] = count
    return found
