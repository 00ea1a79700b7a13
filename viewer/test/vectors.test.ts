import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { ExpressionError, format, parse, type Tree } from "../src/expression";
import { owners, propagate, summed } from "../src/partition";
import { evaluate } from "../src/values";

const shared: Record<string, any[]> = JSON.parse(readFileSync(new URL("./vectors.json", import.meta.url), "utf8"));

const treeJson = (tree: Tree): unknown =>
  tree.kind === "leaf" ? tree.name : { key: tree.key, left: treeJson(tree.left), right: treeJson(tree.right) };
const noTensors = () => {
  throw new Error("no tensors here");
};

describe("vectors shared with Python", () => {
  it.each(shared.expressions!)("expression $source", (vector) => {
    if (vector.error === undefined) {
      const trees = parse(vector.source);
      expect(trees.map(treeJson)).toEqual(vector.trees);
      expect(trees.map((tree) => format(tree))).toEqual(vector.text);
      return;
    }
    try {
      parse(vector.source);
      expect.unreachable();
    } catch (error) {
      expect(error).toBeInstanceOf(ExpressionError);
      expect((error as ExpressionError).message).toBe(vector.error);
      expect((error as ExpressionError).position).toBe(vector.position);
    }
  });

  it.each(shared.values!)("values of $expr $leaves $nodes", (vector) => {
    const faces = evaluate(parse(vector.expr), vector.leaves, vector.nodes, noTensors);
    for (const [key, values] of Object.entries<number[]>(vector.faces))
      faces.get(key)!.data.forEach((x, at) => expect(Math.abs(x - values[at]!)).toBeLessThan(1e-5));
  });

  it.each(shared.shape_errors!)("shape error of $expr", (vector) => {
    expect(() => evaluate(parse(vector.expr), vector.leaves, {}, noTensors)).toThrow(vector.error);
  });

  it.each(shared.blocks!)("blocks of $expr", (vector) => {
    expect(Object.fromEntries(propagate(parse(vector.expr), vector.nodes))).toEqual(vector.blocks);
  });

  it.each(shared.plans!)("ranks of $expr under $plan", (vector) => {
    const trees = parse(vector.expr);
    const found = [...owners(trees, vector.letters, vector.plan)].map(([key, it]) => [
      key, [it.blocks, it.rowStride, it.colStride, it.copies],
    ]);
    expect(Object.fromEntries(found)).toEqual(vector.owners);
    expect(Object.fromEntries(summed(trees, vector.letters, vector.plan))).toEqual(vector.summed);
  });
});
