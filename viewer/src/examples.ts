/** Scenes without a model: the seed's warm-ups, and the guided tour. */

import { DEFAULT, type State } from "./state";
import type { LeafSpec } from "./values";

export interface Example {
  readonly group: string;
  readonly name: string;
  readonly state: State;
}
export interface TourStep {
  readonly title: string;
  readonly text: string;
  readonly state: State;
}

const scene = (state: Partial<State>): State => ({ ...DEFAULT, ...state });
const m = (rows: number, cols: number, more: Partial<LeafSpec> = {}): LeafSpec => ({ rows, cols, ...more });

const HEAD = "out = (attn = (Q = input @ wQ) @ (K_t = wK_t @ input_t)) @ (V = input @ wV) @ wO";
/** Weights are small, so that scores are moderate as in a trained model. */
const headLeaves = (tokens: number, width: number, head: number, keys = tokens): Record<string, LeafSpec> => ({
  input: m(tokens, width), wQ: m(width, head, { low: -0.25, high: 0.25 }), wK_t: m(head, width, { low: -0.25, high: 0.25 }),
  input_t: m(width, keys, { seed: 3 }), wV: m(width, head, { low: -0.25, high: 0.25 }),
  wO: m(head, width, { low: -0.5, high: 0.5 }),
});
const HEAD_NODES = { attn: { epilogue: "causal scaled softmax" } } as const;
const HEAD_LETTERS = {
  input: ["T", "D"], wQ: ["D", "N"], wK_t: ["N", "D"], input_t: ["D", "S"], wV: ["D", "N"], wO: ["N", "D"],
} as const;
const AB = (more: Partial<State>, a: Partial<LeafSpec> = {}, b: Partial<LeafSpec> = {}) =>
  scene({ expr: "C = L @ R", leaves: { L: m(24, 32, a), R: m(32, 24, b) }, playing: true, ...more });

export const EXAMPLES: readonly Example[] = [
  {
    group: "Warm-up: one product", name: "2a Dot products",
    state: AB({ anim: "dot", speed: 24, title: "Dot products" }, { init: "row blocks", blocks: 4 }, { init: "column blocks", blocks: 4 }),
  },
  {
    group: "Warm-up: one product", name: "2b Matrix-vector products",
    state: AB({ anim: "columns", speed: 6, title: "Matrix-vector products" }, { init: "rows" }, { init: "columns" }),
  },
  { group: "Warm-up: one product", name: "2b with random values", state: AB({ anim: "columns", speed: 6, title: "Matrix-vector products" }) },
  { group: "Warm-up: one product", name: "2c Vector-matrix products", state: AB({ anim: "rows", speed: 6, title: "Vector-matrix products" }) },
  {
    group: "Warm-up: one product", name: "2c The identity as a mirror",
    state: scene({
      expr: "C = I @ R", leaves: { I: m(32, 32, { init: "identity" }), R: m(32, 32, { init: "row major" }) },
      anim: "rows", speed: 6, playing: true, title: "The identity mirrors the right argument",
    }),
  },
  { group: "Warm-up: one product", name: "2d Summed outer products", state: AB({ anim: "outer", speed: 6, title: "Summed outer products" }) },
  {
    group: "Warm-up: one product", name: "2d Low rank",
    state: scene({
      expr: "C = L @ R", leaves: { L: m(64, 4), R: m(4, 64) }, anim: "outer", speed: 1, playing: true,
      title: "A product of rank 4",
    }),
  },
  {
    group: "Warm-up: expressions", name: "3a Left-associative chain",
    state: scene({
      expr: "A @ B @ C", leaves: { A: m(32, 24), B: m(24, 32), C: m(32, 24) }, anim: "rows", fuse: true, speed: 6,
      playing: true, title: "A left-associative chain",
    }),
  },
  {
    group: "Warm-up: expressions", name: "3a Bottleneck",
    state: scene({
      expr: "A @ B @ C @ D", leaves: { A: m(48, 32), B: m(32, 8), C: m(8, 32), D: m(32, 8) }, title: "A bottleneck of layers",
    }),
  },
  {
    group: "Warm-up: expressions", name: "3b Right-associative chain",
    state: scene({
      expr: "A @ (B @ C)", leaves: { A: m(24, 32), B: m(32, 24), C: m(24, 32) }, anim: "columns", fuse: true, speed: 6,
      playing: true, title: "A right-associative chain",
    }),
  },
  {
    group: "Warm-up: expressions", name: "3c Binary expression",
    state: scene({
      expr: "(A @ B) @ (C @ D)", leaves: { A: m(24, 16), B: m(16, 32), C: m(32, 16), D: m(16, 24) }, anim: "outer",
      fuse: true, speed: 6, playing: true, title: "A product of products",
    }),
  },
  {
    group: "Warm-up: expressions", name: "3d Data parallel: along i",
    state: scene({
      expr: "A @ B @ C @ D", leaves: { A: m(48, 32), B: m(32, 16), C: m(16, 32), D: m(32, 16) },
      nodes: { "@0": { i: 8 } }, title: "Partitioned along i: the batch is cut, the weights are whole",
    }),
  },
  {
    group: "Warm-up: expressions", name: "3d Partitioned along k",
    state: scene({
      expr: "(A @ B) @ (C @ D)", leaves: { A: m(24, 16), B: m(16, 32), C: m(32, 16), D: m(16, 24) },
      nodes: { "@0": { k: 8 } }, title: "Partitioned along k: left columns meet right rows",
    }),
  },
  {
    group: "Attention", name: "A head",
    state: scene({ expr: HEAD, leaves: headLeaves(48, 64, 16), nodes: HEAD_NODES, title: "An attention head" }),
  },
  {
    group: "Attention", name: "A head, one token at a time",
    state: scene({
      expr: HEAD, leaves: headLeaves(48, 64, 16), nodes: HEAD_NODES, anim: "rows", fuse: true, speed: 4, playing: true,
      title: "Each token goes from input through attention to output",
    }),
  },
  {
    group: "Attention", name: "5b Blockwise parallel transformer",
    state: scene({
      expr: HEAD, leaves: headLeaves(48, 64, 16), nodes: { attn: { ...HEAD_NODES.attn, i: 8, j: 8 }, out: { i: 8 } },
      title: "Queries and keys are both partitioned",
    }),
  },
  {
    group: "Attention", name: "6a A layer to scale",
    state: scene({
      expr: `y = (hidden = (${HEAD}) @ up) @ down`,
      leaves: { ...headLeaves(64, 48, 48), up: m(48, 192, { low: -0.2, high: 0.2 }), down: m(192, 48, { low: -0.2, high: 0.2 }) },
      nodes: { ...HEAD_NODES, hidden: { epilogue: "gelu" } }, title: "Attention and feed-forward parts to scale",
    }),
  },
  {
    group: "Attention", name: "6d One-row decode",
    state: scene({
      expr: "out = (attn = (Q = input @ wQ) @ (K_t = wK_t @ input_t)) @ (V = context @ wV) @ wO",
      leaves: { ...headLeaves(1, 64, 16, 48), context: m(48, 64, { seed: 3 }) },
      nodes: HEAD_NODES, title: "One token against the cache",
    }),
  },
  {
    group: "Attention", name: "Flash-Decoding: split keys",
    state: scene({
      expr: "out = (attn = q @ K_t) @ V", leaves: { q: m(1, 32), K_t: m(32, 96), V: m(96, 32) },
      nodes: { attn: { epilogue: "causal scaled softmax" } }, letters: { q: ["", "H"], K_t: ["H", "S"], V: ["S", "H"] },
      plan: { cp: 4 }, colour: "rank", title: "Split keys: four ranks, then one merge",
    }),
  },
  {
    group: "Low rank", name: "7b LoRA factors in a head",
    state: scene({
      expr: "out = (attn = (Q = input @ (wQ = Q_A @ Q_B)) @ (K_t = (wK_t = K_A @ K_B) @ input_t)) @ (V = input @ (wV = V_A @ V_B)) @ (wO = O_A @ O_B)",
      leaves: {
        input: m(48, 64), input_t: m(64, 48, { seed: 3 }), Q_A: m(64, 4, { low: -0.25, high: 0.25 }), Q_B: m(4, 16),
        K_A: m(16, 4), K_B: m(4, 64, { low: -0.25, high: 0.25 }), V_A: m(64, 4), V_B: m(4, 16), O_A: m(16, 4), O_B: m(4, 64),
      },
      nodes: HEAD_NODES, title: "Weights replaced by factors of rank 4",
    }),
  },
  {
    group: "Partition by a plan", name: "Megatron feed-forward, tp=4",
    state: scene({
      expr: "y = (h = x @ up) @ down",
      leaves: { x: m(32, 32), up: m(32, 96), down: m(96, 32) }, nodes: { h: { epilogue: "gelu" } },
      letters: { x: ["T", "D"], up: ["D", "F"], down: ["F", "D"] }, plan: { tp: 4 }, colour: "rank",
      title: "Column-parallel, then row-parallel: one sum at the end",
    }),
  },
];

const find = (name: string): State => EXAMPLES.find((example) => example.name === name)!.state;
const step = (title: string, text: string, state: State, tour: number): TourStep => ({
  title, text, state: { ...state, title, tour },
});

export const TOUR: readonly TourStep[] = [
  step("A product is a box", "Rows of L on the left and columns of R on top meet inside; their products, summed along the depth, are the result, to which the arrow points. Blue is positive, orange negative.",
    scene({ expr: "C = L @ R", leaves: { L: m(16, 20, { init: "row blocks", blocks: 4 }), R: m(20, 16, { init: "column blocks", blocks: 4 }) } }), 1),
  step("One number at a time", "A dot product sweeps along the depth for each element of the result. Press Space to stop, the comma and full stop keys to step.",
    scene({ ...find("2a Dot products"), leaves: { L: m(16, 20), R: m(20, 16) } }), 2),
  step("One row at a time", "The same product as vector-matrix products: a plane sinks through the box and paints rows.", find("2c Vector-matrix products"), 3),
  step("Rank by rank", "And as a sum of outer products: each step adds a matrix of rank one.", find("2d Summed outer products"), 4),
  step("Products of products", "The result of one product is a side of the next: they share the face. Here a chain runs row by row without waiting.", find("3a Left-associative chain"), 5),
  step("An attention head", "Six products: queries, keys, values, scores, their mixture of values, the output. The scores are a triangle, because a token sees only earlier ones.",
    scene({ expr: HEAD, leaves: headLeaves(32, 48, 12), nodes: HEAD_NODES }), 6),
  step("Cut over four ranks", "Tensor parallelism cuts the inner dimension of a feed-forward part: each colour is a rank. Only the last product is summed over ranks.", find("Megatron feed-forward, tp=4"), 7),
  step("A sharded head with its experts", "The head's rows are cut over two context-parallel ranks and its inner dimension over two tensor-parallel ones; two experts take its output, each on its ranks.",
    scene({
      expr: `${HEAD}; y1 = (h1 = x1 @ up1) @ down1; y2 = (h2 = x2 @ up2) @ down2`,
      leaves: {
        ...headLeaves(32, 48, 12), x1: m(20, 48), up1: m(48, 64), down1: m(64, 48), x2: m(12, 48), up2: m(48, 64), down2: m(64, 48),
      },
      nodes: { ...HEAD_NODES, h1: { epilogue: "silu" }, h2: { epilogue: "silu" } },
      letters: {
        ...HEAD_LETTERS, x1: ["T", "D"], up1: ["D", "F"], down1: ["F", "D"], x2: ["T", "D"], up2: ["D", "F"], down2: ["F", "D"],
      },
      plan: { tp: 2, cp: 2 }, colour: "rank", camera: [0.3, 0.42, 0, 0, 0, 0],
    }), 8),
];
