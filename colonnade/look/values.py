"""Values of a scene's matrices in float64: initialisers, products and epilogues, as viewer/src/values.ts computes them.

    face = times ⊙ epilogue(rotate(left @ right + plus))

Random values are hashes of (seed, index), so that a link with a seed shows the same matrix everywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from colonnade.errors import ConfigError
from colonnade.look.expression import Leaf, Product, Tree, leaves, products

MAX_SIDE = 8192
MAX_ELEMENTS = 1 << 24
INITS = (
    "rows", "columns", "row major", "column major", "row blocks", "column blocks", "uniform", "gaussian", "identity",
    "lower", "upper", "constant",
)  # fmt: skip
EPILOGUES = (
    "none", "relu", "gelu", "gelu_tanh", "sigmoid", "silu", "tanh", "square", "layernorm", "softmax", "scaled softmax",
    "causal scaled softmax",
)  # fmt: skip
Array = np.ndarray
Spec = Mapping[str, Any]


def shapes(trees: Sequence[Tree], specs: Mapping[str, Spec]) -> dict[str, tuple[int, int]]:
    """Shape of each leaf by name and product by key; raises :class:`ConfigError` where they do not fit."""
    found: dict[str, tuple[int, int]] = {}

    def visit(tree: Tree) -> tuple[int, int]:
        if isinstance(tree, Leaf):
            if tree.name not in specs:
                raise ConfigError(f"the matrix '{tree.name}' has no size; set its rows and cols")
            shape = specs[tree.name]["rows"], specs[tree.name]["cols"]
            if not 1 <= min(shape) <= max(shape) <= MAX_SIDE:
                raise ConfigError(f"'{tree.name}' is {shape[0]} x {shape[1]}; sides are from 1 to {MAX_SIDE}")
            return found.setdefault(tree.name, shape)
        left, right = visit(tree.left), visit(tree.right)
        if left[1] != right[0]:
            raise ConfigError(
                f"'{tree.key}': the left matrix is {left[0]} x {left[1]} and the right one {right[0]} x {right[1]}; "
                f"{left[1]} columns need {left[1]} rows"
            )
        return found.setdefault(tree.key, (left[0], right[1]))

    for tree in trees:
        visit(tree)
    if sum(rows * cols for rows, cols in found.values()) > MAX_ELEMENTS:
        raise ConfigError(f"the matrices have more than {MAX_ELEMENTS} elements; make them smaller")
    return found


def random(seed: int, index: Array) -> Array:
    """Hashes of (seed, index), uniform in [0, 1)."""
    h = (np.uint32(seed) ^ ((index + 1).astype(np.uint32) * np.uint32(0x9E3779B1))).astype(np.uint32)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (h ^ (h >> np.uint32(16))).astype(np.float64) / 2**32


def seed_of(name: str, seed: int) -> int:
    """The seed of a leaf's generator: FNV-1a of its name, and the scene's seed."""
    h = 0x811C9DC5
    for char in name:
        h = ((h ^ ord(char)) * 0x01000193) & 0xFFFFFFFF
    return (h ^ ((seed + 1) * 0x85EBCA6B)) & 0xFFFFFFFF


def initialise(name: str, spec: Spec) -> Array:
    """The matrix of a leaf with an initialiser, in float32."""
    rows, cols, init = spec["rows"], spec["cols"], spec.get("init", "gaussian")
    if init not in INITS:
        raise ConfigError(f"there is no initialiser '{init}'; use one of: {', '.join(INITS)}")
    low = spec.get("low", 0.0 if init in ("identity", "lower", "upper") else -1.0)
    high, blocks, seed = spec.get("high", 1.0), spec.get("blocks", 2), seed_of(name, spec.get("seed", 0))
    i, j = np.mgrid[:rows, :cols]
    index = i * cols + j

    def part(at: Array, count: int) -> Array:
        return at / (count - 1) if count > 1 else np.ones_like(at, dtype=np.float64)

    def gaussian() -> Array:
        radius = np.sqrt(-2 * np.log(1 - random(seed, 2 * index)))
        return (low + high) / 2 + (high - low) / 2 * radius * np.cos(2 * math.pi * random(seed, 2 * index + 1))

    makers: dict[str, Callable[[], Array]] = {
        "rows": lambda: low + (high - low) * part(i, rows),
        "columns": lambda: low + (high - low) * part(j, cols),
        "row major": lambda: low + (high - low) * part(index, rows * cols),
        "column major": lambda: low + (high - low) * part(j * rows + i, rows * cols),
        "row blocks": lambda: np.where(i * blocks // rows % 2, low, high),
        "column blocks": lambda: np.where(j * blocks // cols % 2, low, high),
        "uniform": lambda: low + (high - low) * random(seed, index),
        "gaussian": gaussian,
        "identity": lambda: np.where(i == j, high, low),
        "lower": lambda: np.where(j <= i, high, low),
        "upper": lambda: np.where(j >= i, high, low),
        "constant": lambda: np.full((rows, cols), high),
    }
    value = makers[init]()
    if sparsity := spec.get("sparsity", 0.0):
        value = np.where(random(seed ^ 0x5BD1E995, index) < sparsity, 0.0, value)
    return value.astype(np.float32)


_POINTWISE: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "square": np.square,
}


def apply_epilogue(x: Array, epilogue: str, depth: int, node: Spec) -> Array:
    """``x`` after an epilogue; ``depth`` is the product's k."""
    if epilogue in _POINTWISE:
        return _POINTWISE[epilogue](x)
    if epilogue == "layernorm":
        return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    if epilogue not in EPILOGUES:
        raise ConfigError(f"there is no epilogue '{epilogue}'; use one of: {', '.join(EPILOGUES)}")
    rows, cols = x.shape
    x = x * (1.0 if epilogue == "softmax" else node.get("scale", depth**-0.5))
    if epilogue == "causal scaled softmax":
        position, key = np.arange(rows)[:, None] + max(0, cols - rows), np.arange(cols)
        seen = (key <= position) & (key > position - (node.get("window") or cols + rows))
        x = np.where(seen, x, -np.inf)
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs (p, p + w/2) of columns, or of rows if the tokens are columns."""
    if len(cos) != len(x):
        return rotate(x.T, cos.T, sin.T).T
    half, x = cos.shape[1], x.copy()
    a, b = x[:, :half].copy(), x[:, half : 2 * half].copy()
    x[:, :half], x[:, half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return x


def evaluate(
    trees: Sequence[Tree],
    leaf_specs: Mapping[str, Spec],
    node_specs: Mapping[str, Spec],
    tensor: Callable[[Spec], Array] | None = None,
) -> dict[str, Array]:
    """All faces by leaf name and product key; ``tensor`` gives the leaves that are tensors of a model."""
    shapes(trees, leaf_specs)
    found: dict[str, Array] = {}

    def leaf(name: str) -> Array:
        if name not in found:
            spec = leaf_specs[name]
            if "tensor" in spec:
                assert tensor is not None, "a scene with tensors of a model needs the model"
                found[name] = np.asarray(tensor(spec["tensor"]), dtype=np.float64)
            else:
                found[name] = initialise(name, spec).astype(np.float64)
        return found[name]

    def face(node: Product) -> Array:
        spec = node_specs.get(node.key, {})
        if "recorded" in spec:
            return leaf(spec["recorded"])
        left, right = (found[c.name if isinstance(c, Leaf) else c.key] for c in (node.left, node.right))
        x = left @ right
        if "plus" in spec:
            x = x + leaf(spec["plus"])
        if "cos" in spec:
            x = rotate(x, leaf(spec["cos"]), leaf(spec["sin"]))
        x = apply_epilogue(x, spec.get("epilogue", "none"), left.shape[1], spec)
        return x * leaf(spec["times"]) if "times" in spec else x

    for tree in trees:
        for each in leaves(tree):
            leaf(each.name)
        for node in products(tree):
            found[node.key] = face(node)
    return found
