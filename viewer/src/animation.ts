/** Animations as a schedule: children before parents, fused where sweep planes are parallel.
 *
 *     dot       one element at a time            rows      one row of the result (vector-matrix products)
 *     columns   one column (matrix-vector)       outer     one outer product, added to the result
 *
 * A left-associative chain with "rows" is one sweep along i, a right-associative one with "columns" along j; a product
 * with "outer" goes on with the columns of its left child and the rows of its right one.
 */

import { shown } from "./describe";
import type { Product, Tree } from "./expression";
import { needsRows, type NodeSpec, type Shape } from "./values";

export const KINDS = ["none", "dot", "dot columns", "rows", "columns", "outer"] as const;
export type Kind = (typeof KINDS)[number];

export interface Part {
  readonly node: Product;
  readonly kind: Kind;
}
export interface Phase {
  readonly parts: readonly Part[];
  readonly start: number;
  readonly steps: number;
}

export interface Schedule {
  readonly phases: readonly Phase[];
  readonly total: number;
}

const keyOf = (tree: Tree): string => (tree.kind === "leaf" ? tree.name : tree.key);

export function schedule(
  trees: readonly Tree[],
  shapes: ReadonlyMap<string, Shape>,
  kind: Kind,
  fuse: boolean,
  nodes: Readonly<Record<string, NodeSpec>>,
): Schedule {
  const phases: Phase[] = [];
  let total = 0;
  if (kind === "none") return { phases, total };
  const done = new Set<string>();
  const spec = (node: Product): NodeSpec => (Object.hasOwn(nodes, node.key) ? nodes[node.key]! : {});
  const stepsOf = (node: Product, how: Kind): number => {
    const [i, j] = shapes.get(node.key)!;
    const k = shapes.get(keyOf(node.left))![1];
    return how === "rows" ? i : how === "columns" ? j : how === "outer" ? k : i * j;
  };
  const chain = (node: Product): Part[] => {
    const parts: Part[] = [{ node, kind }];
    if (!fuse) return parts;
    if (kind === "rows") {
      for (let next = node.left; next.kind === "product"; next = next.left) parts.unshift({ node: next, kind });
    } else if (kind === "columns") {
      for (let next = node.right; next.kind === "product"; next = next.right) {
        if (needsRows(spec(next).epilogue)) break;
        parts.unshift({ node: next, kind });
      }
    } else if (kind === "outer") {
      if (node.left.kind === "product" && !needsRows(spec(node.left).epilogue))
        parts.unshift({ node: node.left, kind: "columns" });
      if (node.right.kind === "product") parts.unshift({ node: node.right, kind: "rows" });
    }
    return parts;
  };
  const visit = (tree: Tree): void => {
    if (tree.kind === "leaf") return;
    const parts = chain(tree);
    const fused = new Set(parts.map((part) => part.node.key));
    for (const { node } of parts)
      for (const child of [node.left, node.right]) if (!fused.has(keyOf(child))) visit(child);
    if (parts.every((part) => done.has(part.node.key))) return;
    parts.forEach((part) => done.add(part.node.key));
    const steps = stepsOf(tree, kind);
    phases.push({ parts, start: total, steps });
    total += steps;
  };
  trees.forEach(visit);
  return { phases, total };
}

export interface Progress {
  readonly kind: Kind;
  /** Steps done: 0 hides the result, `steps` shows all of it. */
  readonly done: number;
  readonly steps: number;
  /** Whether the sweep is inside this product now. */
  readonly active: boolean;
}

/** How far each product is after `cursor` steps. */
export function progress(plan: Schedule, cursor: number): Map<string, Progress> {
  const found = new Map<string, Progress>();
  for (const { parts, start, steps } of plan.phases) {
    const done = Math.min(steps, Math.max(0, cursor - start));
    for (const { node, kind } of parts)
      found.set(node.key, { kind, done, steps, active: cursor > start && cursor <= start + steps && cursor < plan.total });
  }
  return found;
}

/** What is happening, in words. */
export function narrate(plan: Schedule, cursor: number): string {
  if (!plan.phases.length) return "";
  if (cursor >= plan.total) return "All products are complete.";
  const phase = plan.phases.find((each) => cursor < each.start + each.steps)!;
  const names = phase.parts.map((part) => shown(part.node)).join(", ");
  const words: Record<Kind, string> = {
    none: "", dot: "dot product", "dot columns": "dot product", rows: "row", columns: "column", outer: "outer product",
  };
  return `${names}: ${words[phase.parts.at(-1)!.kind]} ${cursor - phase.start} of ${phase.steps}`;
}
