"""Vectors that Python and TypeScript share: ``python -m tests.look.vectors`` writes viewer/test/vectors.json."""

import json
from pathlib import Path
from typing import Any

from colonnade.config import Plan
from colonnade.errors import ConfigError
from colonnade.look.expression import ExpressionError, Leaf, Tree, format_tree, parse
from colonnade.look.partition import owners, propagate, summed
from colonnade.look.values import EPILOGUES, INITS, evaluate

FILE = Path(__file__).parents[2] / "viewer/test/vectors.json"
HEAD = "out = (attn = (Q = input @ wQ) @ (K_t = wK_t @ input_t)) @ (V = input @ wV) @ wO"

EXPRESSIONS = [
    "A @ B",
    "C = A @ B",
    "A",
    "A @ B @ C",
    "A @ (B @ C)",
    "(A @ B) @ (C @ D)",
    HEAD,
    "((((A))))@B",
    "x1 = a.b_c @ _d",
    "A @ B; C @ D",
    "y = (h = x @ u) @ d; z = x @ w",
    " A\n@\tB ",
    "A @ A",
    "((A @ B))",
    "o = ((A @ B))",
    "(" * 32 + "A" + ")" * 32,
    " @ ".join(["A"] * 65),
    # errors
    "",
    " ",
    "@",
    "A @",
    "A B",
    "A @ @ B",
    "(A @ B",
    "A @ B)",
    "()",
    "A = B",
    "(Q = A) @ B",
    "Q = (P = A @ B)",
    "1 @ A",
    "A @ 1",
    "A @ B; ",
    "A;;B",
    "Q = A @ Q",
    "(Q = A @ B) @ (Q = A @ B)",
    "= A",
    "A = = B",
    "A @ (B = C @ D",
    "é @ A",
    "A @ 𝔸",
    "A.B @ A..",
    "A @ B #",
    "A\x00 @ B",
    "<script>alert(1)</script>",
    "__proto__ @ constructor",
    "A * B",
    "A\u00a0@ B",
    "(" * 33 + "A" + ")" * 33,
    " @ ".join(["A"] * 66),
    "A" * 65 + " @ B",
    "A" * 64 + " @ B",
    "A @ " * 1500 + "A",
]

VALUES: list[dict[str, Any]] = [
    *(
        {"expr": "A", "leaves": {"A": {"rows": 3, "cols": 4, "init": init} | extra}, "nodes": {}}
        for init in INITS
        for extra in ({}, {"low": -0.5, "high": 2, "blocks": 3, "seed": 7, "sparsity": 0.3})
    ),
    *(
        {
            "expr": "C = A @ B",
            "leaves": {"A": {"rows": 5, "cols": 3}, "B": {"rows": 3, "cols": 5}},
            "nodes": {"C": {"epilogue": epilogue}},
        }
        for epilogue in EPILOGUES
    ),
    {
        "expr": "y = (h = x @ u) @ d",
        "leaves": {
            "x": {"rows": 4, "cols": 3},
            "u": {"rows": 3, "cols": 6},
            "d": {"rows": 6, "cols": 3},
            "gate": {"rows": 4, "cols": 6},
            "b": {"rows": 1, "cols": 6},
            "whole": {"rows": 4, "cols": 3},
        },
        "nodes": {"h": {"plus": "b", "epilogue": "silu", "times": "gate"}, "y": {"plus": "whole"}},
    },
    {
        "expr": "attn = (Q = x @ wQ) @ (K_t = wK @ x_t)",
        "leaves": {
            "x": {"rows": 5, "cols": 6},
            "wQ": {"rows": 6, "cols": 4},
            "wK": {"rows": 4, "cols": 6},
            "x_t": {"rows": 6, "cols": 5},
            "cos": {"rows": 5, "cols": 2},
            "sin": {"rows": 5, "cols": 2},
            "cos_t": {"rows": 2, "cols": 5},
            "sin_t": {"rows": 2, "cols": 5},
            "bias": {"rows": 4, "cols": 1},
        },
        "nodes": {
            "Q": {"cos": "cos", "sin": "sin"},
            "K_t": {"plus": "bias", "cos": "cos_t", "sin": "sin_t"},
            "attn": {"epilogue": "causal scaled softmax", "window": 3, "scale": 0.7},
        },
    },
    {
        "expr": "attn = q @ k",
        "leaves": {"q": {"rows": 1, "cols": 3}, "k": {"rows": 3, "cols": 6}},
        "nodes": {"attn": {"epilogue": "causal scaled softmax"}},
    },
]

BLOCKS: list[dict[str, Any]] = [
    {"expr": "A @ B @ C @ D", "nodes": {"@0": {"i": 4}}},
    {"expr": "(A @ B) @ (C @ D)", "nodes": {"@0": {"k": 8}}},
    {"expr": "y = (h = x @ up) @ down", "nodes": {"y": {"k": 4, "i": 2}}},
    {"expr": HEAD, "nodes": {"out": {"i": 8}, "attn": {"j": 4}}},
    {"expr": "A @ A", "nodes": {"@0": {"i": 2, "j": 3, "k": 5}}},
]

LETTERS = {
    "input": ("T", "D"),
    "wQ": ("D", "H"),
    "wK_t": ("H", "D"),
    "input_t": ("D", "S"),
    "wV": ("D", "H"),
    "wO": ("H", "D"),
    "x": ("T", "D"),
    "up": ("D", "F"),
    "down": ("F", "D"),
    "q": ("", "H"),
    "k": ("H", "S"),
    "v": ("S", "H"),
    "tokens": ("B", "E"),
}
PLANS: list[dict[str, Any]] = [
    {"expr": expr, "letters": LETTERS, "plan": plan}
    for expr, plan in [
        (HEAD, {"tp": 2}),
        (HEAD, {"cp": 4, "tp": 2}),
        ("y = (h = x @ up) @ down", {"tp": 4}),
        ("y = (h = x @ up) @ down", {"tp": 2, "cp": 2, "dp": 3}),
        ("o = (a = q @ k) @ v", {"cp": 4}),
        ("o = (a = q @ k) @ v", {}),
        ("tokens", {"dp": 4, "ep": 2}),
        ("tokens", {"replicate": 2, "dp": 2, "tp": 2}),
    ]
]


def tree_json(tree: Tree) -> Any:
    if isinstance(tree, Leaf):
        return tree.name
    return {"key": tree.key, "left": tree_json(tree.left), "right": tree_json(tree.right)}


def expression_case(source: str) -> dict[str, Any]:
    try:
        trees = parse(source)
    except ExpressionError as error:
        return {"source": source, "error": error.what, "position": error.position}
    return {"source": source, "trees": list(map(tree_json, trees)), "text": list(map(format_tree, trees))}


def value_case(case: dict[str, Any]) -> dict[str, Any]:
    faces = evaluate(parse(case["expr"]), case["leaves"], case["nodes"])
    return case | {"faces": {key: [float(f"{x:.9g}") for x in face.ravel()] for key, face in faces.items()}}


def block_case(case: dict[str, Any]) -> dict[str, Any]:
    return case | {
        "blocks": {key: list(blocks) for key, blocks in propagate(parse(case["expr"]), case["nodes"]).items()}
    }


def plan_case(case: dict[str, Any]) -> dict[str, Any]:
    trees, plan = parse(case["expr"]), Plan(**case["plan"])
    found = owners(trees, case["letters"], plan)
    return case | {
        "owners": {
            key: [*map(list, [it.blocks]), it.row_stride, it.col_stride, it.copies] for key, it in found.items()
        },
        "summed": summed(trees, case["letters"], plan),
        "letters": {key: list(value) for key, value in case["letters"].items()},
    }


def shape_errors() -> list[dict[str, Any]]:
    cases = [
        ("A @ B", {"A": {"rows": 3, "cols": 4}, "B": {"rows": 5, "cols": 6}}),
        ("A", {}),
        ("A", {"A": {"rows": 0, "cols": 4}}),
        ("A", {"A": {"rows": 10**9, "cols": 10**9}}),
        ("A @ B", {"A": {"rows": 8192, "cols": 8192}, "B": {"rows": 8192, "cols": 8192}}),
        ("constructor", {}),
    ]
    found = []
    for expr, leaves in cases:
        try:
            evaluate(parse(expr), leaves, {})
        except ConfigError as error:
            found.append({"expr": expr, "leaves": leaves, "error": str(error).split("; set")[0].split("; make")[0]})
    return found


def all_vectors() -> dict[str, Any]:
    return {
        "expressions": list(map(expression_case, EXPRESSIONS)),
        "values": list(map(value_case, VALUES)),
        "blocks": list(map(block_case, BLOCKS)),
        "plans": list(map(plan_case, PLANS)),
        "shape_errors": shape_errors(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_vectors(), indent=None, separators=(",", ":"), ensure_ascii=True) + "\n")
