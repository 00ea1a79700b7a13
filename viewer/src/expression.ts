/** Expressions of matrix products; the same grammar as colonnade/look/expression.py, held equal by shared vectors.
 *
 *     program := expr (';' expr)*        expr := [name '='] term ('@' term)*        term := name | '(' expr ')'
 *
 * `@` is left-associative. Nothing is evaluated: a name is only a name.
 */

export const MAX_LENGTH = 4096;
export const MAX_DEPTH = 32;
export const MAX_PRODUCTS = 64;
export const MAX_NAME = 64;

export interface Leaf {
  readonly kind: "leaf";
  readonly name: string;
  readonly position: number;
}
export interface Product {
  readonly kind: "product";
  /** The given name, or "@" and the path from the statement's root ("@0LR"). */
  readonly key: string;
  readonly name: string | null;
  readonly left: Tree;
  readonly right: Tree;
  readonly position: number;
}
export type Tree = Leaf | Product;

export class ExpressionError extends Error {
  constructor(
    message: string,
    readonly position: number,
  ) {
    super(message);
    this.name = "ExpressionError";
  }
}

interface Token {
  readonly kind: "name" | "@" | "(" | ")" | "=" | ";" | "end";
  readonly text: string;
  readonly position: number;
}

const NAME = /[A-Za-z_][A-Za-z0-9_.]*/y;

function tokenise(source: string): Token[] {
  if (source.length > MAX_LENGTH)
    throw new ExpressionError(`an expression has at most ${MAX_LENGTH} characters`, MAX_LENGTH);
  const tokens: Token[] = [];
  let at = 0;
  while (at < source.length) {
    const char = source[at]!;
    if (char === " " || char === "\n" || char === "\t") {
      at++;
    } else if (char === "@" || char === "(" || char === ")" || char === "=" || char === ";") {
      tokens.push({ kind: char, text: char, position: at++ });
    } else {
      NAME.lastIndex = at;
      const match = NAME.exec(source);
      if (!match) throw new ExpressionError(`unexpected '${String.fromCodePoint(source.codePointAt(at)!)}'`, at);
      if (match[0].length > MAX_NAME) throw new ExpressionError(`a name has at most ${MAX_NAME} characters`, at);
      tokens.push({ kind: "name", text: match[0], position: at });
      at += match[0].length;
    }
  }
  tokens.push({ kind: "end", text: "the end", position: source.length });
  return tokens;
}

interface Draft {
  name: string | null;
  left: Draft | Leaf;
  right: Draft | Leaf;
  position: number;
  kind: "draft";
}

class Parser {
  private at = 0;
  private depth = 0;
  private products = 0;

  constructor(private readonly tokens: Token[]) {}

  program(): (Draft | Leaf)[] {
    const statements = [this.expression()];
    while (this.peek.kind === ";") {
      this.at++;
      statements.push(this.expression());
    }
    if (this.peek.kind !== "end") throw this.unexpected("expected '@', ';' or the end");
    return statements;
  }

  private get peek(): Token {
    return this.tokens[this.at]!;
  }

  private unexpected(expected: string): ExpressionError {
    const { kind, text, position } = this.peek;
    return new ExpressionError(`${expected}, not ${kind === "end" ? text : `'${text}'`}`, position);
  }

  private expression(): Draft | Leaf {
    let name: Token | null = null;
    if (this.peek.kind === "name" && this.tokens[this.at + 1]!.kind === "=") {
      name = this.peek;
      this.at += 2;
    }
    let tree = this.term();
    while (this.peek.kind === "@") {
      const position = this.peek.position;
      this.at++;
      if (++this.products > MAX_PRODUCTS)
        throw new ExpressionError(`an expression has at most ${MAX_PRODUCTS} products`, position);
      tree = { kind: "draft", name: null, left: tree, right: this.term(), position };
    }
    if (name) {
      if (tree.kind === "leaf") throw new ExpressionError(`'${name.text}' must name a product`, name.position);
      if (tree.name !== null) throw new ExpressionError(`the product has a name already: '${tree.name}'`, name.position);
      tree.name = name.text;
    }
    return tree;
  }

  private term(): Draft | Leaf {
    const { kind, text, position } = this.peek;
    if (kind === "name") {
      this.at++;
      return { kind: "leaf", name: text, position };
    }
    if (kind !== "(") throw this.unexpected("expected a name or '('");
    if (++this.depth > MAX_DEPTH) throw new ExpressionError(`parentheses nest at most ${MAX_DEPTH} deep`, position);
    this.at++;
    const tree = this.expression();
    if (this.peek.kind !== ")") throw this.unexpected("expected '@' or ')'");
    this.at++;
    this.depth--;
    return tree;
  }
}

function finish(draft: Draft | Leaf, path: string): Tree {
  if (draft.kind === "leaf") return draft;
  return {
    kind: "product",
    key: draft.name ?? `@${path}`,
    name: draft.name,
    left: finish(draft.left, `${path}L`),
    right: finish(draft.right, `${path}R`),
    position: draft.position,
  };
}

/** The trees of a program's statements; throws ExpressionError with a position. */
export function parse(source: string): Tree[] {
  const trees = new Parser(tokenise(source)).program().map((draft, i) => finish(draft, String(i)));
  const named = new Set<string>();
  for (const node of trees.flatMap(products)) {
    if (node.name === null) continue;
    if (named.has(node.name)) throw new ExpressionError(`two products have the name '${node.name}'`, node.position);
    named.add(node.name);
  }
  for (const leaf of trees.flatMap(leaves))
    if (named.has(leaf.name))
      throw new ExpressionError(`'${leaf.name}' names a product and a matrix`, leaf.position);
  return trees;
}

/** All products of a tree, children before parents. */
export function products(tree: Tree): Product[] {
  return tree.kind === "leaf" ? [] : [...products(tree.left), ...products(tree.right), tree];
}

/** All leaves of a tree, from left to right. */
export function leaves(tree: Tree): Leaf[] {
  return tree.kind === "leaf" ? [tree] : [...leaves(tree.left), ...leaves(tree.right)];
}

/** The expression as text, fully bracketed. */
export function format(tree: Tree, outer = true): string {
  if (tree.kind === "leaf") return tree.name;
  const body = `${format(tree.left, false)} @ ${format(tree.right, false)}`;
  const named = tree.name === null ? body : `${tree.name} = ${body}`;
  return outer ? named : `(${named})`;
}
