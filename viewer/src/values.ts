/** Values of a scene: initialisers, products and epilogues; equal to colonnade/look/values.py by shared vectors. */

import { leaves, products, type Product, type Tree } from "./expression";

export const MAX_SIDE = 8192;
export const MAX_ELEMENTS = 1 << 24;
export const MAX_WORK = 4e9;

export const INITS = [
  "rows", "columns", "row major", "column major", "row blocks", "column blocks", "uniform", "gaussian", "identity",
  "lower", "upper", "constant",
] as const;
export type Init = (typeof INITS)[number];

export const EPILOGUES = [
  "none", "relu", "gelu", "gelu_tanh", "sigmoid", "silu", "tanh", "square", "layernorm", "softmax", "scaled softmax",
  "causal scaled softmax",
] as const;
export type Epilogue = (typeof EPILOGUES)[number];

export interface TensorRef {
  readonly run: string;
  readonly layer: number;
  readonly head: number;
  readonly name: string;
}
export interface LeafSpec {
  readonly rows: number;
  readonly cols: number;
  readonly init?: Init;
  readonly seed?: number;
  readonly low?: number;
  readonly high?: number;
  readonly blocks?: number;
  readonly sparsity?: number;
  readonly tensor?: TensorRef;
}
export interface NodeSpec {
  readonly epilogue?: Epilogue;
  /** Factor of a scaled softmax; by default 1/sqrt(k). */
  readonly scale?: number;
  /** Keys that a query sees under a causal softmax; by default all up to its own. */
  readonly window?: number;
  /** Leaves, or products of earlier statements, that are added, multiplied, or hold cosines and sines. */
  readonly plus?: string;
  readonly times?: string;
  readonly cos?: string;
  readonly sin?: string;
  /** A leaf with the model's own values in place of the computed ones. */
  readonly recorded?: string;
  readonly i?: number;
  readonly j?: number;
  readonly k?: number;
}

export interface Matrix {
  readonly rows: number;
  readonly cols: number;
  readonly data: Float32Array;
}

export class ShapeError extends Error {}

export type Shape = readonly [rows: number, cols: number];

/** Shape of each leaf by name and product by key; throws ShapeError. */
export function shapes(trees: readonly Tree[], specs: Readonly<Record<string, LeafSpec>>): Map<string, Shape> {
  const found = new Map<string, Shape>();
  let elements = 0;
  let work = 0;
  const visit = (tree: Tree): Shape => {
    if (tree.kind === "leaf") {
      const spec = Object.hasOwn(specs, tree.name) ? specs[tree.name] : undefined;
      if (!spec) throw new ShapeError(`the matrix '${tree.name}' has no size`);
      if (!found.has(tree.name)) elements += spec.rows * spec.cols;
      const shape = [spec.rows, spec.cols] as const;
      if (Math.max(...shape) > MAX_SIDE || Math.min(...shape) < 1)
        throw new ShapeError(`'${tree.name}' is ${shape[0]} x ${shape[1]}; sides are from 1 to ${MAX_SIDE}`);
      found.set(tree.name, shape);
      return shape;
    }
    const left = visit(tree.left);
    const right = visit(tree.right);
    if (left[1] !== right[0])
      throw new ShapeError(
        `'${tree.key}': the left matrix is ${left[0]} x ${left[1]} and the right one ${right[0]} x ${right[1]}; ` +
          `${left[1]} columns need ${left[1]} rows`,
      );
    const shape = [left[0], right[1]] as const;
    found.set(tree.key, shape);
    elements += shape[0] * shape[1];
    work += left[0] * left[1] * right[1];
    return shape;
  };
  trees.forEach(visit);
  if (elements > MAX_ELEMENTS) throw new ShapeError(`the matrices have more than ${MAX_ELEMENTS} elements`);
  if (work > MAX_WORK) throw new ShapeError(`the products take more than ${MAX_WORK} multiplications`);
  return found;
}

/** A hash of (seed, index), uniform in [0, 1). */
export function random(seed: number, index: number): number {
  let h = (seed ^ Math.imul(index + 1, 0x9e3779b1)) >>> 0;
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return ((h ^ (h >>> 16)) >>> 0) / 4294967296;
}

/** The seed of a leaf's generator: FNV-1a of its name, and the scene's seed. */
export function seedOf(name: string, seed: number): number {
  let h = 0x811c9dc5;
  for (const char of name) h = Math.imul(h ^ char.charCodeAt(0), 0x01000193);
  return (h ^ Math.imul(seed + 1, 0x85ebca6b)) >>> 0;
}

export function initialise(name: string, spec: LeafSpec): Matrix {
  const { rows, cols } = spec;
  const init = spec.init ?? "gaussian";
  const low = spec.low ?? (init === "identity" || init === "lower" || init === "upper" ? 0 : -1);
  const high = spec.high ?? 1;
  const blocks = spec.blocks ?? 2;
  const seed = seedOf(name, spec.seed ?? 0);
  const part = (at: number, count: number) => (count > 1 ? at / (count - 1) : 1);
  const band = (at: number, count: number) => (Math.floor((at * blocks) / count) % 2 ? low : high);
  const at = (i: number, j: number): number => {
    const index = i * cols + j;
    switch (init) {
      case "rows":
        return low + (high - low) * part(i, rows);
      case "columns":
        return low + (high - low) * part(j, cols);
      case "row major":
        return low + (high - low) * part(index, rows * cols);
      case "column major":
        return low + (high - low) * part(j * rows + i, rows * cols);
      case "row blocks":
        return band(i, rows);
      case "column blocks":
        return band(j, cols);
      case "uniform":
        return low + (high - low) * random(seed, index);
      case "gaussian": {
        // Box and Muller; 1 - u is in (0, 1].
        const radius = Math.sqrt(-2 * Math.log(1 - random(seed, 2 * index)));
        const angle = 2 * Math.PI * random(seed, 2 * index + 1);
        return (low + high) / 2 + ((high - low) / 2) * radius * Math.cos(angle);
      }
      case "identity":
        return i === j ? high : low;
      case "lower":
        return j <= i ? high : low;
      case "upper":
        return j >= i ? high : low;
      case "constant":
        return high;
    }
  };
  const data = new Float32Array(rows * cols);
  const sparsity = spec.sparsity ?? 0;
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < cols; j++) {
      const index = i * cols + j;
      const dropped = sparsity > 0 && random((seed ^ 0x5bd1e995) >>> 0, index) < sparsity;
      data[index] = dropped ? 0 : at(i, j);
    }
  return { rows, cols, data };
}

export function matmul(left: Matrix, right: Matrix): Matrix {
  const { rows, cols: depth } = left;
  const cols = right.cols;
  const data = new Float32Array(rows * cols);
  const sum = new Float64Array(cols);
  const a = left.data;
  const b = right.data;
  for (let i = 0; i < rows; i++) {
    sum.fill(0);
    for (let k = 0; k < depth; k++) {
      const x = a[i * depth + k]!;
      if (x === 0) continue;
      const start = k * cols;
      for (let j = 0; j < cols; j++) sum[j] = sum[j]! + x * b[start + j]!;
    }
    data.set(sum, i * cols);
  }
  return { rows, cols, data };
}

function erf(x: number): number {
  // Abramowitz and Stegun 7.1.26: the error is below 1.5e-7.
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return Math.sign(x) * (1 - poly * Math.exp(-x * x));
}

const POINTWISE: Readonly<Partial<Record<Epilogue, (x: number) => number>>> = {
  relu: (x) => Math.max(x, 0),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  sigmoid: (x) => 1 / (1 + Math.exp(-x)),
  silu: (x) => x / (1 + Math.exp(-x)),
  tanh: (x) => Math.tanh(x),
  square: (x) => x * x,
};

/** Whether an epilogue needs whole rows, so that a sweep over columns cannot apply it. */
export function needsRows(epilogue: Epilogue | undefined): boolean {
  return epilogue !== undefined && (epilogue === "layernorm" || epilogue.endsWith("softmax"));
}

export function applyEpilogue(x: Matrix, epilogue: Epilogue, depth: number, node: NodeSpec): void {
  const { rows, cols, data } = x;
  const pointwise = POINTWISE[epilogue];
  if (pointwise) {
    for (let at = 0; at < data.length; at++) data[at] = pointwise(data[at]!);
    return;
  }
  if (epilogue === "none") return;
  for (let i = 0; i < rows; i++) {
    const row = data.subarray(i * cols, (i + 1) * cols);
    if (epilogue === "layernorm") {
      const mean = row.reduce((sum, value) => sum + value, 0) / cols;
      const variance = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / cols;
      for (let j = 0; j < cols; j++) row[j] = (row[j]! - mean) / Math.sqrt(variance + 1e-5);
      continue;
    }
    const scale = epilogue === "softmax" ? 1 : (node.scale ?? 1 / Math.sqrt(depth));
    const causal = epilogue === "causal scaled softmax";
    // With fewer queries than keys (one-row decoding) the queries are the last positions.
    const position = i + Math.max(0, cols - rows);
    const stop = causal ? Math.min(cols, position + 1) : cols;
    const start = causal && node.window ? Math.max(0, position + 1 - node.window) : 0;
    let top = -Infinity;
    for (let j = start; j < stop; j++) top = Math.max(top, row[j]! * scale);
    let sum = 0;
    for (let j = start; j < stop; j++) sum += Math.exp(row[j]! * scale - top);
    for (let j = 0; j < cols; j++)
      row[j] = j >= start && j < stop ? Math.exp(row[j]! * scale - top) / sum : 0;
  }
}

/** Adds a matrix of the same size, a row to each row, or a column to each column. */
function combine(x: Matrix, other: Matrix, with_: (a: number, b: number) => number, what: string): void {
  const rowStep = other.rows === 1 ? 0 : other.cols;
  const colStep = other.cols === 1 ? 0 : 1;
  if ((other.rows !== 1 && other.rows !== x.rows) || (other.cols !== 1 && other.cols !== x.cols))
    throw new ShapeError(`'${what}' is ${other.rows} x ${other.cols} and does not fit ${x.rows} x ${x.cols}`);
  for (let i = 0; i < x.rows; i++)
    for (let j = 0; j < x.cols; j++) {
      const at = i * x.cols + j;
      x.data[at] = with_(x.data[at]!, other.data[i * rowStep + j * colStep]!);
    }
}

/** Rotates pairs (p, p + w/2) of rows or columns; the tokens are the axis along which cosines have the same size. */
function rotate(x: Matrix, cos: Matrix, sin: Matrix): void {
  const byRow = cos.rows === x.rows; // tokens are rows, as in Q; otherwise columns, as in K_t
  if (!byRow && cos.cols !== x.cols) throw new ShapeError("the rotary angles do not fit the matrix");
  const half = byRow ? cos.cols : cos.rows;
  if (2 * half > (byRow ? x.cols : x.rows)) throw new ShapeError("the rotary angles are wider than the head");
  const tokens = byRow ? x.rows : x.cols;
  for (let t = 0; t < tokens; t++)
    for (let p = 0; p < half; p++) {
      const first = byRow ? t * x.cols + p : p * x.cols + t;
      const second = byRow ? first + half : first + half * x.cols;
      const angle = byRow ? t * half + p : p * cos.cols + t;
      const a = x.data[first]!;
      const b = x.data[second]!;
      x.data[first] = a * cos.data[angle]! - b * sin.data[angle]!;
      x.data[second] = b * cos.data[angle]! + a * sin.data[angle]!;
    }
}

/** The face of one product from its arguments. */
export function face(
  node: Product, left: Matrix, right: Matrix, spec: NodeSpec, extra: (name: string) => Matrix,
): Matrix {
  if (spec.recorded !== undefined) {
    const value = extra(spec.recorded);
    if (value.rows !== left.rows || value.cols !== right.cols)
      throw new ShapeError(`the recorded '${spec.recorded}' does not have the size of '${node.key}'`);
    return value;
  }
  const result = matmul(left, right);
  if (spec.plus !== undefined) combine(result, extra(spec.plus), (a, b) => a + b, spec.plus);
  if (spec.cos !== undefined && spec.sin !== undefined) rotate(result, extra(spec.cos), extra(spec.sin));
  applyEpilogue(result, spec.epilogue ?? "none", left.cols, spec);
  if (spec.times !== undefined) combine(result, extra(spec.times), (a, b) => a * b, spec.times);
  return result;
}

/** All faces, by leaf name and product key; `tensor` gives the leaves that are tensors of a model. */
export function evaluate(
  trees: readonly Tree[],
  leafSpecs: Readonly<Record<string, LeafSpec>>,
  nodeSpecs: Readonly<Record<string, NodeSpec>>,
  tensor: (ref: TensorRef, spec: LeafSpec) => Matrix,
): Map<string, Matrix> {
  shapes(trees, leafSpecs);
  const found = new Map<string, Matrix>();
  const leaf = (name: string): Matrix => {
    const known = found.get(name);
    if (known) return known;
    const spec = Object.hasOwn(leafSpecs, name) ? leafSpecs[name] : undefined;
    if (!spec) throw new ShapeError(`the matrix '${name}' has no size`);
    if (spec.rows * spec.cols > MAX_ELEMENTS) throw new ShapeError(`'${name}' has more than ${MAX_ELEMENTS} elements`);
    const value = spec.tensor ? tensor(spec.tensor, spec) : initialise(name, spec);
    found.set(name, value);
    return value;
  };
  for (const tree of trees) {
    leaves(tree).forEach((each) => leaf(each.name));
    for (const node of products(tree)) {
      const argument = (child: Tree) => found.get(child.kind === "leaf" ? child.name : child.key)!;
      const spec = Object.hasOwn(nodeSpecs, node.key) ? nodeSpecs[node.key]! : {};
      found.set(node.key, face(node, argument(node.left), argument(node.right), spec, leaf));
    }
  }
  return found;
}
