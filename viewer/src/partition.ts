/** Block counts of a partitioned expression, and the rank of each block under a plan; as in colonnade/look/partition.py. */

import { products, type Tree } from "./expression";
import type { NodeSpec } from "./values";

/** How many blocks a matrix has down its rows and along its columns. */
export type Blocks = readonly [rows: number, cols: number];

/** i passes to left children, j to right children; a node's k is its left child's j and its right child's i. */
export function propagate(trees: readonly Tree[], nodes: Readonly<Record<string, NodeSpec>>): Map<string, Blocks> {
  const found = new Map<string, Blocks>();
  const put = (name: string, blocks: Blocks) => {
    const known = found.get(name) ?? [1, 1];
    found.set(name, [Math.max(known[0], blocks[0]), Math.max(known[1], blocks[1])]);
  };
  const visit = (tree: Tree, rows: number, cols: number): void => {
    if (tree.kind === "leaf") return put(tree.name, [rows, cols]);
    const own = Object.hasOwn(nodes, tree.key) ? nodes[tree.key]! : {};
    const i = Math.max(rows, own.i ?? 1);
    const j = Math.max(cols, own.j ?? 1);
    const k = own.k ?? 1;
    put(tree.key, [i, j]);
    visit(tree.left, i, k);
    visit(tree.right, k, j);
  };
  for (const tree of trees) visit(tree, 1, 1);
  return found;
}

export interface PlanSizes {
  readonly pp?: number;
  readonly replicate?: number;
  readonly dp?: number;
  readonly cp?: number;
  readonly tp?: number;
  readonly ep?: number;
}

/** The letters of a matrix's rows and columns (docs/alphabet.md), one of each. */
export type Letters = readonly [rows: string, cols: string];

interface Split {
  readonly count: number;
  readonly stride: number;
}

function splitOf(letter: string, plan: PlanSizes): Split {
  const tp = plan.tp ?? 1;
  const cp = plan.cp ?? 1;
  const data = (plan.dp ?? 1) * (plan.replicate ?? 1);
  switch (letter) {
    case "B": // sequences
      return { count: data, stride: cp * tp };
    case "T": // queries of one sequence
    case "S": // its keys
      return { count: cp, stride: tp };
    case "F":
    case "N":
    case "K":
    case "V":
      return { count: tp, stride: 1 };
    case "E": // whole experts; ep ranks lie over the stage's, innermost first
      return { count: plan.ep ?? 1, stride: 1 };
    default:
      return { count: 1, stride: 1 };
  }
}

export interface Owner {
  readonly blocks: Blocks;
  /** The first rank that has the block (r, c), from r * rowStride + c * colStride. */
  readonly rowStride: number;
  readonly colStride: number;
  /** Ranks of a pipeline stage that have the same block. */
  readonly copies: number;
}

export function ownerOf(letters: Letters, plan: PlanSizes): Owner {
  const rows = splitOf(letters[0], plan);
  // The same mesh axis can split a matrix once only: queries by keys are split by queries.
  const same = rows.count > 1 && rows.stride === splitOf(letters[1], plan).stride;
  const cols = same ? { count: 1, stride: 1 } : splitOf(letters[1], plan);
  const ranks = (plan.replicate ?? 1) * (plan.dp ?? 1) * (plan.cp ?? 1) * (plan.tp ?? 1);
  return {
    blocks: [rows.count, cols.count],
    rowStride: rows.stride,
    colStride: cols.stride,
    copies: Math.max(1, Math.floor(ranks / (rows.count * cols.count))),
  };
}

/** The owner of each face from its letters; a product has those of its arguments. */
export function owners(
  trees: readonly Tree[], letters: Readonly<Record<string, Letters>>, plan: PlanSizes,
): Map<string, Owner> {
  const found = new Map<string, Owner>();
  const lettersOf = (tree: Tree): Letters => {
    if (tree.kind === "leaf") return Object.hasOwn(letters, tree.name) ? letters[tree.name]! : ["", ""];
    return [lettersOf(tree.left)[0], lettersOf(tree.right)[1]];
  };
  const visit = (tree: Tree): void => {
    found.set(tree.kind === "leaf" ? tree.name : tree.key, ownerOf(lettersOf(tree), plan));
    if (tree.kind === "product") {
      visit(tree.left);
      visit(tree.right);
    }
  };
  trees.forEach(visit);
  return found;
}

/** Products that are partial sums under a plan: their k is split over ranks, which sum their results. */
export function summed(
  trees: readonly Tree[], letters: Readonly<Record<string, Letters>>, plan: PlanSizes,
): Map<string, number> {
  const found = new Map<string, number>();
  const letter = (tree: Tree, side: 0 | 1): string => {
    if (tree.kind === "product") return letter(side ? tree.right : tree.left, side);
    return Object.hasOwn(letters, tree.name) ? letters[tree.name]![side] : "";
  };
  for (const node of trees.flatMap(products)) {
    const { count, stride } = splitOf(letter(node.left, 1), plan);
    const rows = splitOf(letter(node.left, 0), plan);
    // Rows split over the same ranks see all of k: keys and values go round a ring.
    if (count > 1 && !(rows.count > 1 && rows.stride === stride)) found.set(node.key, count);
  }
  return found;
}

/** The block of an index, as Axis.part cuts: shares of ceil(size / count). */
export function blockOf(index: number, size: number, count: number): number {
  return Math.floor(index / Math.ceil(size / count));
}
