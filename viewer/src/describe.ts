/** A scene in words, for screen readers and for whoever cannot see the drawing. */

import { leaves, products, type Tree } from "./expression";
import { summed } from "./partition";
import type { State } from "./state";
import type { Shape } from "./values";

const keyOf = (tree: Tree): string => (tree.kind === "leaf" ? tree.name : tree.key);

export function shown(tree: Tree): string {
  if (tree.kind === "leaf") return tree.name;
  return tree.name ?? `${shown(tree.left)} @ ${shown(tree.right)}`.slice(0, 60);
}

export function describeScene(trees: readonly Tree[], sizes: ReadonlyMap<string, Shape>, state: State): string {
  const size = (tree: Tree) => sizes.get(keyOf(tree))!.join(" × ");
  const ranks = summed(trees, state.letters, state.plan);
  const lines: string[] = [];
  if (state.title) lines.push(`${state.title}.`);
  for (const node of trees.flatMap(products)) {
    const spec = Object.hasOwn(state.nodes, node.key) ? state.nodes[node.key]! : {};
    const then = spec.epilogue && spec.epilogue !== "none" ? `, then ${spec.epilogue}` : "";
    const sum = ranks.has(node.key) ? `, summed over ${ranks.get(node.key)} ranks` : "";
    const recorded = spec.recorded === undefined ? "" : ", shown as the model computed it";
    lines.push(
      `${shown(node)} (${size(node)}) is ${shown(node.left)} (${size(node.left)}) times ${shown(node.right)} (${size(node.right)})${then}${sum}${recorded}.`,
    );
  }
  const alone = trees.filter((tree) => tree.kind === "leaf");
  for (const tree of alone) lines.push(`${shown(tree)} is a matrix of ${size(tree)}.`);
  const names = new Set(trees.flatMap(leaves).map((leaf) => leaf.name));
  lines.push(`${names.size === 1 ? "One matrix" : `${names.size} matrices`} given: ${[...names].join(", ")}.`);
  return lines.join(" ");
}
