/** A scene in words: for screen readers, and for the captions of matrices and numbers. */

import { leaves, products, type Product, type Tree } from "./expression";
import { summed, type Letters } from "./partition";
import type { State } from "./state";
import type { NodeSpec, Shape } from "./values";

const keyOf = (tree: Tree): string => (tree.kind === "leaf" ? tree.name : tree.key);
const specOf = (state: State, node: Product): NodeSpec => (Object.hasOwn(state.nodes, node.key) ? state.nodes[node.key]! : {});

export function shown(tree: Tree): string {
  if (tree.kind === "leaf") return tree.name;
  return tree.name ?? `${shown(tree.left)} @ ${shown(tree.right)}`.slice(0, 60);
}

/** A number with five digits. */
export const digits = (value: number): string => String(Number(value.toPrecision(5)));

type SizeOf = (key: string) => string;

/** How a product is made, with the sizes of what it is made of. */
function derivation(node: Product, state: State, sizeOf: SizeOf): string {
  const spec = specOf(state, node);
  const parts = [`${shown(node.left)}${sizeOf(keyOf(node.left))} times ${shown(node.right)}${sizeOf(keyOf(node.right))}`];
  if (spec.plus !== undefined) parts.push(`plus ${spec.plus}${sizeOf(spec.plus)}`);
  if (spec.cos !== undefined) parts.push("turned by rotary positions");
  if (spec.epilogue && spec.epilogue !== "none") parts.push(`then ${spec.epilogue}`);
  if (spec.times !== undefined) parts.push(`each element times that of ${spec.times}${sizeOf(spec.times)}`);
  if (spec.recorded !== undefined) parts.push("shown as the model computed it");
  return parts.join(", ");
}

/** One matrix in a line: its name, its size, and how it is made. */
export function caption(trees: readonly Tree[], sizes: ReadonlyMap<string, Shape>, state: State, key: string): string {
  const node = trees.flatMap(products).find((each) => each.key === key);
  const size = sizes.get(key)?.join(" × ");
  return node ? `${shown(node)}, ${size}: ${derivation(node, state, () => "")}` : `${key}, ${size}: given`;
}

export function describeScene(trees: readonly Tree[], sizes: ReadonlyMap<string, Shape>, state: State): string {
  const sizeOf = (key: string) => {
    const leaf = Object.hasOwn(state.leaves, key) ? state.leaves[key]! : undefined;
    const size = sizes.get(key) ?? (leaf && [leaf.rows, leaf.cols]);
    return size ? ` (${size.join(" × ")})` : "";
  };
  const ranks = summed(trees, state.letters, state.plan);
  const lines: string[] = [];
  if (state.title) lines.push(`${state.title}.`);
  const given = new Set(trees.flatMap(leaves).map((leaf) => leaf.name));
  for (const node of trees.flatMap(products)) {
    const sum = ranks.has(node.key) ? `, summed over ${ranks.get(node.key)} ranks` : "";
    lines.push(`${shown(node)}${sizeOf(node.key)} is ${derivation(node, state, sizeOf)}${sum}.`);
    const { plus, times } = specOf(state, node);
    for (const name of [plus, times]) if (name !== undefined && Object.hasOwn(state.leaves, name)) given.add(name);
  }
  for (const tree of trees) if (tree.kind === "leaf") lines.push(`${shown(tree)} is a matrix of ${sizes.get(tree.name)!.join(" × ")}.`);
  lines.push(`${given.size === 1 ? "One matrix" : `${given.size} matrices`} given: ${[...given].join(", ")}.`);
  return lines.join(" ");
}

/** What the tokens of a scene are: the letters T and S count tokens; a leaf's rows may be some of them only. */
export interface Tokens {
  readonly pieces: readonly string[];
  readonly letters: Readonly<Record<string, Letters>>;
  readonly positions: Readonly<Record<string, readonly number[]>>;
}

/** The tokens of the row and the column of an element in words; "" where neither is a token, as in a weight. */
export function tokensAt(tree: Tree, i: number, j: number, tokens: Tokens): string {
  const pieceOf = (side: 0 | 1, index: number): string | undefined => {
    let leaf = tree;
    while (leaf.kind === "product") leaf = side ? leaf.right : leaf.left;
    const { name } = leaf;
    const some = side === 0 && Object.hasOwn(tokens.positions, name) ? tokens.positions[name]! : null;
    const letter = Object.hasOwn(tokens.letters, name) ? tokens.letters[name]![side] : "";
    if (some) return tokens.pieces[some[index]!];
    return letter === "T" || letter === "S" ? tokens.pieces[index] : undefined;
  };
  const quoted = (piece: string) => `“${piece.replaceAll("\n", "⏎")}”`;
  const row = pieceOf(0, i);
  const column = pieceOf(1, j);
  if (row !== undefined && column !== undefined) return `query ${quoted(row)} → key ${quoted(column)}`;
  const one = row ?? column;
  return one === undefined ? "" : `token ${quoted(one)}`;
}
