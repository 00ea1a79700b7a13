import { deflateRawSync } from "node:zlib";
import { describe, expect, it } from "vitest";
import { narrate, progress, schedule } from "../src/animation";
import { EXAMPLES, TOUR } from "../src/examples";
import { caption, describeScene, tokensAt } from "../src/describe";
import { parse, products, leaves } from "../src/expression";
import { add, collisions, elementAt, layOut, SCHEMES } from "../src/geometry";
import { checked, decode, DEFAULT, encode, StateError, type State } from "../src/state";
import { blockOf } from "../src/partition";
import { evaluate, random, shapes } from "../src/values";
import { randomState } from "./random_state";

const HEAD = "out = (attn = (Q = input @ wQ) @ (K_t = wK_t @ input_t)) @ (V = input @ wV) @ wO";
const HEAD_LEAVES = {
  input: { rows: 16, cols: 24 }, wQ: { rows: 24, cols: 5 }, wK_t: { rows: 5, cols: 24 }, input_t: { rows: 24, cols: 16 },
  wV: { rows: 24, cols: 5 }, wO: { rows: 5, cols: 24 },
};
const options = { scheme: "blocks", gap: 3, scatter: 0 } as const;

describe("geometry", () => {
  it("joins the faces of a product round one corner", () => {
    const trees = parse("C = A @ B");
    const found = shapes(trees, { A: { rows: 3, cols: 4 }, B: { rows: 4, cols: 5 } });
    const box = layOut(trees, found, options).boxes[0]!;
    for (let i = 0; i < 3; i++)
      for (let k = 0; k < 4; k++)
        for (let j = 0; j < 5; j++) {
          // The interior point is where the left row, the right column and the result's normal meet.
          const inner = add(add(add(box.inner, box.result.row, i), box.result.col, j), box.depth, k);
          const difference = (a: readonly number[]) => a.map((x, axis) => Math.abs(x - inner[axis]!) > 1e-9);
          expect(difference(elementAt(box.left, i, k)).filter(Boolean).length).toBeLessThanOrEqual(1);
          expect(difference(elementAt(box.right, k, j)).filter(Boolean).length).toBeLessThanOrEqual(1);
          expect(difference(elementAt(box.result, i, j)).filter(Boolean).length).toBeLessThanOrEqual(1);
        }
  });

  it("makes a child's result its parent's argument", () => {
    const trees = parse(HEAD);
    const { boxes } = layOut(trees, shapes(trees, HEAD_LEAVES), options);
    const attn = boxes.find((box) => box.node.key === "attn")!;
    const q = boxes.find((box) => box.node.key === "Q")!;
    expect(q.result).toEqual(attn.left);
    expect(boxes.find((box) => box.node.key === "K_t")!.result).toEqual(attn.right);
  });

  it.each(["blocks", "zigzag"] as const)("leaves no overlap in %s", (scheme) => {
    for (const { state } of scheme === "blocks" ? EXAMPLES : []) {
      const trees = parse(state.expr);
      expect(collisions(layOut(trees, shapes(trees, state.leaves), { ...options, scheme }))).toEqual([]);
    }
    const trees = parse(HEAD);
    expect(collisions(layOut(trees, shapes(trees, HEAD_LEAVES), { ...options, scheme }))).toEqual([]);
  });

  it("takes a custom place, and all schemes differ", () => {
    const trees = parse(HEAD);
    const sizes = shapes(trees, HEAD_LEAVES);
    const place = { polarity: 1, left: 1, right: 0, result: 1 };
    expect(layOut(trees, sizes, { ...options, places: { attn: place } }).boxes[1]!.place === undefined).toBe(false);
    const box = layOut(trees, sizes, { ...options, places: { attn: place } }).boxes.find((b) => b.node.key === "attn")!;
    expect(box.place).toEqual(place);
    const all = SCHEMES.map((scheme) => JSON.stringify(layOut(trees, sizes, { ...options, scheme }).boxes));
    expect(new Set(all).size).toBe(3);
  });

  it("puts statements side by side", () => {
    const trees = parse("A @ B; C @ D");
    const spec = { rows: 4, cols: 4 };
    const layout = layOut(trees, shapes(trees, { A: spec, B: spec, C: spec, D: spec }), options);
    const xs = (name: string) => layout.frames.get(name)![0]!.origin[0];
    expect(xs("@1")).toBeGreaterThan(xs("@0") + 4);
    expect(collisions(layout)).toEqual([]);
  });
});

describe("animation", () => {
  const trees = parse(HEAD);
  const sizes = shapes(trees, HEAD_LEAVES);
  const names = (kind: Parameters<typeof schedule>[2], fuse: boolean, nodes = {}) =>
    schedule(trees, sizes, kind, fuse, nodes).phases.map((phase) => phase.parts.map((part) => part.node.key).join(" "));

  it("computes children before parents", () => {
    const order = products(trees[0]!).map((node) => node.key);
    expect(names("rows", false)).toEqual(order);
    expect(schedule(trees, sizes, "dot", false, {}).total).toBe(
      products(trees[0]!).reduce((sum, node) => sum + sizes.get(node.key)![0] * sizes.get(node.key)![1], 0),
    );
  });

  it("fuses the left-associative chain of a head along i", () => {
    expect(names("rows", true)).toEqual(["K_t", "V", "Q attn @0L out"]);
    const softmax = { attn: { epilogue: "softmax" } } as const;
    expect(names("rows", true, softmax)).toEqual(["K_t", "V", "Q attn @0L out"]);
  });

  it("fuses a right-associative chain along j, unless rows must be whole", () => {
    const right = parse("y = A @ (h = B @ (g = C @ D))");
    const spec = { rows: 4, cols: 4 };
    const of = shapes(right, { A: spec, B: spec, C: spec, D: spec });
    const parts = (nodes: object) =>
      schedule(right, of, "columns", true, nodes as never).phases.map((phase) => phase.parts.map((p) => p.node.key).join(" "));
    expect(parts({})).toEqual(["g h y"]);
    expect(parts({ h: { epilogue: "softmax" } })).toEqual(["g h", "y"]);
  });

  it("joins left columns and right rows by outer products", () => {
    const binary = parse("y = (l = A @ B) @ (r = C @ D)");
    const spec = { rows: 4, cols: 4 };
    const plan = schedule(binary, shapes(binary, { A: spec, B: spec, C: spec, D: spec }), "outer", true, {});
    expect(plan.phases.map((phase) => phase.parts.map((p) => `${p.node.key} ${p.kind}`))).toEqual([
      ["r rows", "l columns", "y outer"],
    ]);
  });

  it("counts from nothing to everything", () => {
    const plan = schedule(trees, sizes, "outer", false, {});
    expect([...progress(plan, 0).values()].every((each) => each.done === 0)).toBe(true);
    expect([...progress(plan, plan.total).values()].every((each) => each.done === each.steps)).toBe(true);
    expect(narrate(plan, plan.total)).toContain("complete");
    expect(narrate(plan, 0)).toContain("0 of");
  });
});

describe("links", () => {
  it("restore 100 random states; the browser takes 1,000", async () => {
    for (let seed = 0; seed < 100; seed++) {
      const state = randomState(seed);
      expect(await decode(await encode(state))).toEqual(state);
    }
  });

  it("are compressed when they are long", async () => {
    const leaves = Object.fromEntries([...Array(100).keys()].map((i) => [`A${i}`, { rows: 10, cols: 10 }]));
    const hash = await encode({ ...DEFAULT, leaves });
    expect(hash[0]).toBe("z");
    expect(hash.length).toBeLessThan(JSON.stringify(leaves).length / 3);
  });

  it.each([
    ["x", "neither"], ["j%%%", "base64url"], ["jAAAA", "JSON"], ["zAAAA", "decompress"],
    [`j${btoa('{"expr":1}')}`, "expr"], [`j${btoa('{"camera":[1]}')}`, "list of 6"], [`j${btoa('{"gap":1e99}')}`, "gap"],
    [`j${btoa('{"__proto__":{"gap":3}}')}`, "known setting"], [`j${btoa('{"constructor":1}')}`, "known setting"],
    [`j${btoa('{"leaves":{"A":{"rows":1e9,"cols":2}}}')}`, "rows"], [`j${btoa('{"leaves":{"A":{}}}')}`, "rows and cols"],
    [`j${btoa('{"leaves":{"A":{"rows":2,"cols":2,"init":"alert(1)"}}}')}`, "init"], [`j${btoa("[]")}`, "table"],
    [`j${btoa('{"model":{"page":"../admin"}}')}`, "page"], [`j${"A".repeat(70000)}`, "65536"],
    [`z${deflateRawSync(Buffer.alloc(1 << 22, 32)).toString("base64url")}`, "bytes"],
  ])("refuse %s", async (hash, message) => {
    await expect(decode(hash)).rejects.toThrow(message);
    await expect(decode(hash)).rejects.toBeInstanceOf(StateError);
  });

  it("do not change objects of the page", () => {
    checked(JSON.parse('{"leaves":{"__proto__":{"rows":1,"cols":1}}}'));
    expect(({} as { rows?: number }).rows).toBeUndefined();
  });
});

describe("examples and tour", () => {
  it.each([...EXAMPLES, ...TOUR.map((step) => ({ name: step.title, state: step.state }))])("$name is a scene", ({ state }) => {
    const full: State = checked(JSON.parse(JSON.stringify({ ...DEFAULT, ...state })));
    const trees = parse(full.expr);
    const faces = evaluate(trees, full.leaves, full.nodes, () => {
      throw new Error("no model");
    });
    for (const face of faces.values()) expect(face.data.every(Number.isFinite)).toBe(true);
    const words = describeScene(trees, shapes(trees, full.leaves), full);
    for (const leaf of trees.flatMap(leaves)) expect(words).toContain(leaf.name);
  });

  it("has eight steps, the last one sharded with experts", () => {
    expect(TOUR.length).toBe(8);
    expect(TOUR[7]!.state.plan).toMatchObject({ tp: 2 });
    expect(TOUR.every((step, at) => step.state.tour === at + 1)).toBe(true);
  });
});

describe("words", () => {
  const trees = parse("gated = x @ gate; y = (h = x @ (up = up_A @ up_B)) @ down");
  const side = { rows: 4, cols: 4 };
  const state: State = {
    ...DEFAULT,
    leaves: { x: side, gate: side, up_A: side, up_B: side, down: side, up_base: side, bdown: { rows: 1, cols: 4 } },
    nodes: { gated: { epilogue: "silu" }, h: { times: "gated" }, up: { plus: "up_base" }, y: { plus: "bdown" } },
  };
  const sizes = shapes(trees, state.leaves);

  it("name a gate, a base and a bias", () => {
    const words = describeScene(trees, sizes, state);
    expect(words).toContain("gated (4 × 4) is x (4 × 4) times gate (4 × 4), then silu.");
    expect(words).toContain("h (4 × 4) is x (4 × 4) times up (4 × 4), each element times that of gated (4 × 4).");
    expect(words).toContain("up (4 × 4) is up_A (4 × 4) times up_B (4 × 4), plus up_base (4 × 4).");
    expect(words).toContain("plus bdown (1 × 4).");
    expect(words).toContain("7 matrices given: x, gate, up_A, up_B, down, up_base, bdown.");
  });

  it("name one matrix in a line", () => {
    expect(caption(trees, sizes, state, "h")).toBe("h, 4 × 4: x times up, each element times that of gated");
    expect(caption(trees, sizes, state, "x")).toBe("x, 4 × 4: given");
  });

  it("name the tokens of rows and columns that are tokens", () => {
    const head = parse(HEAD)[0]!;
    const nodes = new Map(products(head).map((node) => [node.key, node]));
    const letters = {
      input: ["T", "D"], wQ: ["D", "H"], wK_t: ["H", "D"], input_t: ["D", "S"], wV: ["D", "H"], wO: ["H", "D"],
    } as const;
    const tokens = { pieces: ["The", " fox", "\n"], letters, positions: {} };
    const at = (key: string, i: number, j: number) => tokensAt(nodes.get(key) ?? { kind: "leaf", name: key, position: 0 }, i, j, tokens);
    expect(at("attn", 1, 0)).toBe("query “ fox” → key “The”");
    expect(at("attn", 2, 2)).toBe("query “⏎” → key “⏎”");
    for (const key of ["Q", "V", "out", "input"]) expect(at(key, 1, 0)).toBe("token “ fox”");
    for (const key of ["K_t", "input_t"]) expect(at(key, 1, 0)).toBe("token “The”");
    for (const key of ["wQ", "wK_t", "wV", "wO"]) expect(at(key, 1, 0)).toBe("");
    const some = { ...tokens, letters: { x: ["T", "D"] } as const, positions: { x: [2] } };
    expect(tokensAt({ kind: "leaf", name: "x", position: 0 }, 0, 1, some)).toBe("token “⏎”");
  });
});

describe("small rules", () => {
  it("cuts shares as Axis.part does", () => {
    expect([...Array(7).keys()].map((at) => blockOf(at, 7, 3))).toEqual([0, 0, 0, 1, 1, 1, 2]);
  });
  it("has a uniform generator", () => {
    const values = [...Array(10000).keys()].map((index) => random(5, index));
    expect(Math.abs(values.reduce((a, b) => a + b) / 10000 - 0.5)).toBeLessThan(0.01);
    expect(new Set(values).size).toBeGreaterThan(9990);
  });
});
