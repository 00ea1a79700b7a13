"""Expressions of matrix products, the same grammar as viewer/src/expression.ts; shared test vectors keep them equal.

    program := expr (';' expr)*        expr := [name '='] term ('@' term)*        term := name | '(' expr ')'

``@`` is left-associative. A product has a key: its name, or "@", the statement's number and the path from its root
("@0LR"). Names are never evaluated as code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from colonnade.errors import ConfigError

MAX_LENGTH = 4096
MAX_DEPTH = 32
MAX_PRODUCTS = 64
MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


class ExpressionError(ConfigError):
    """A malformed expression; ``position`` is the index of the offending character."""

    def __init__(self, what: str, position: int):
        super().__init__(f"{what} (at character {position}); an expression is like: out = (attn = Q @ K_t) @ V")
        self.what, self.position = what, position


@dataclass(frozen=True)
class Leaf:
    """A matrix."""

    name: str
    position: int = field(compare=False, default=0)


@dataclass
class Product:
    """left @ right."""

    left: "Tree"
    right: "Tree"
    name: str | None = None
    key: str = ""
    position: int = field(compare=False, default=0)


Tree = Leaf | Product


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int


def _tokenise(source: str) -> list[_Token]:
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters", MAX_LENGTH)
    tokens, at = [], 0
    while at < len(source):
        char = source[at]
        if char in " \n\t":
            at += 1
        elif char in "@()=;":
            tokens.append(_Token(char, char, at))
            at += 1
        elif match := _NAME.match(source, at):
            if len(match[0]) > MAX_NAME:
                raise ExpressionError(f"a name has at most {MAX_NAME} characters", at)
            tokens.append(_Token("name", match[0], at))
            at = match.end()
        else:
            raise ExpressionError(f"unexpected '{char}'", at)
    tokens.append(_Token("end", "the end", len(source)))
    return tokens


class _Parser:
    def __init__(self, tokens: list[_Token]):
        self._tokens, self._at, self._depth, self._products = tokens, 0, 0, 0

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _unexpected(self, expected: str) -> ExpressionError:
        token = self._peek
        found = token.text if token.kind == "end" else f"'{token.text}'"
        return ExpressionError(f"{expected}, not {found}", token.position)

    def program(self) -> list[Tree]:
        statements = [self._expression()]
        while self._peek.kind == ";":
            self._at += 1
            statements.append(self._expression())
        if self._peek.kind != "end":
            raise self._unexpected("expected '@', ';' or the end")
        return statements

    def _expression(self) -> Tree:
        name = None
        if self._peek.kind == "name" and self._tokens[self._at + 1].kind == "=":
            name = self._peek
            self._at += 2
        tree = self._term()
        while self._peek.kind == "@":
            position = self._peek.position
            self._at += 1
            self._products += 1
            if self._products > MAX_PRODUCTS:
                raise ExpressionError(f"an expression has at most {MAX_PRODUCTS} products", position)
            tree = Product(tree, self._term(), position=position)
        if name is not None:
            if isinstance(tree, Leaf):
                raise ExpressionError(f"'{name.text}' must name a product", name.position)
            if tree.name is not None:
                raise ExpressionError(f"the product has a name already: '{tree.name}'", name.position)
            tree.name = name.text
        return tree

    def _term(self) -> Tree:
        token = self._peek
        if token.kind == "name":
            self._at += 1
            return Leaf(token.text, token.position)
        if token.kind != "(":
            raise self._unexpected("expected a name or '('")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"parentheses nest at most {MAX_DEPTH} deep", token.position)
        self._at += 1
        tree = self._expression()
        if self._peek.kind != ")":
            raise self._unexpected("expected '@' or ')'")
        self._at += 1
        self._depth -= 1
        return tree


def parse(source: str) -> list[Tree]:
    """The trees of a program's statements; raises :class:`ExpressionError`."""
    trees = _Parser(_tokenise(source)).program()
    for i, tree in enumerate(trees):
        _set_keys(tree, str(i))
    named: set[str] = set()
    for node in (node for tree in trees for node in products(tree) if node.name is not None):
        if node.name in named:
            raise ExpressionError(f"two products have the name '{node.name}'", node.position)
        named.add(str(node.name))
    for leaf in (leaf for tree in trees for leaf in leaves(tree)):
        if leaf.name in named:
            raise ExpressionError(f"'{leaf.name}' names a product and a matrix", leaf.position)
    return trees


def _set_keys(tree: Tree, path: str) -> None:
    if isinstance(tree, Product):
        tree.key = tree.name or f"@{path}"
        _set_keys(tree.left, f"{path}L")
        _set_keys(tree.right, f"{path}R")


def products(tree: Tree) -> Iterator[Product]:
    """All products of ``tree``, children before parents."""
    if isinstance(tree, Product):
        yield from products(tree.left)
        yield from products(tree.right)
        yield tree


def leaves(tree: Tree) -> Iterator[Leaf]:
    """All leaves of ``tree``, from left to right."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.left)
        yield from leaves(tree.right)


def format_tree(tree: Tree, *, outer: bool = True) -> str:
    """``tree`` as text, fully bracketed."""
    if isinstance(tree, Leaf):
        return tree.name
    body = f"{format_tree(tree.left, outer=False)} @ {format_tree(tree.right, outer=False)}"
    named = body if tree.name is None else f"{tree.name} = {body}"
    return named if outer else f"({named})"
