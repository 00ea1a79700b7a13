/** Where faces are: a product is a box whose left, right and result faces are joined round one corner.
 *
 * A frame gives a face's first element and the steps of its rows and columns, in units of one element. A child's result
 * frame is its parent's argument frame, so that it is one face. The box of a product lies on one side of its result;
 * that side, and at which end of the result the arguments stand, are the choices of a layout.
 */

import type { Product, Tree } from "./expression";
import type { Shape } from "./values";

export type Vec = readonly [number, number, number];

export interface Frame {
  readonly origin: Vec;
  readonly row: Vec;
  readonly col: Vec;
  readonly shape: Shape;
}

/** The choices of one node, 0 or 1 each. */
export interface Place {
  /** 1: the box lies on the other side of the result face. */
  readonly polarity: number;
  /** 1: the left argument stands at the last column of the result. */
  readonly left: number;
  /** 1: the right argument stands at the last row of the result. */
  readonly right: number;
  /** 1: k runs towards the result. */
  readonly result: number;
}

export const SCHEMES = ["blocks", "zigzag", "wheel"] as const;
export type Scheme = (typeof SCHEMES)[number];

export interface Box {
  readonly node: Product;
  readonly result: Frame;
  readonly left: Frame;
  readonly right: Frame;
  /** The direction of k, and the element (0, 0, 0) of the interior. */
  readonly depth: Vec;
  readonly inner: Vec;
  readonly size: readonly [i: number, k: number, j: number];
  readonly place: Place;
}

export interface Layout {
  readonly frames: Map<string, Frame[]>;
  readonly boxes: Box[];
  readonly low: Vec;
  readonly high: Vec;
}

export const add = (a: Vec, b: Vec, by = 1): Vec => [a[0] + by * b[0], a[1] + by * b[1], a[2] + by * b[2]];
export const cross = (a: Vec, b: Vec): Vec => [
  a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0],
];
export const scale = (a: Vec, by: number): Vec => [a[0] * by, a[1] * by, a[2] * by];

/** The position of element (i, j) of a face. */
export const elementAt = (frame: Frame, i: number, j: number): Vec =>
  add(add(frame.origin, frame.row, i), frame.col, j);

function place(node: Product, result: Frame, depth: number, gap: number, choice: Place): Box {
  const [i, j] = result.shape;
  const normal = scale(cross(result.row, result.col), choice.polarity ? -1 : 1);
  const towards = choice.result ? -1 : 1;
  const start = add(result.origin, normal, choice.result ? gap + depth - 1 : gap);
  const k = scale(normal, towards);
  const left: Frame = {
    origin: add(start, result.col, choice.left ? j - 1 + gap : -gap), row: result.row, col: k, shape: [i, depth],
  };
  const right: Frame = {
    origin: add(start, result.row, choice.right ? i - 1 + gap : -gap), row: k, col: result.col, shape: [depth, j],
  };
  return { node, result, left, right, depth: k, inner: start, size: [i, depth, j], place: choice };
}

type Bounds = readonly [Vec, Vec];

/** Bounds of a box with its arguments, without its result, which it shares with its parent. */
function bounds(box: Box): Bounds {
  const corners = [box.left, box.right].flatMap((frame) => [
    frame.origin, elementAt(frame, frame.shape[0] - 1, frame.shape[1] - 1),
  ]);
  const low = [0, 1, 2].map((axis) => Math.min(...corners.map((c) => c[axis]!))) as unknown as Vec;
  const high = [0, 1, 2].map((axis) => Math.max(...corners.map((c) => c[axis]!))) as unknown as Vec;
  return [low, high];
}

export function overlap(a: Bounds, b: Bounds): boolean {
  return [0, 1, 2].every((axis) => a[0][axis]! < b[1][axis]! && b[0][axis]! < a[1][axis]!);
}

/** The choices of a node in the order in which a scheme prefers them. */
function preferences(scheme: Scheme, level: number, side: "L" | "R" | ""): Place[] {
  const all: Place[] = [];
  const odd = level % 2;
  const [left, right] = scheme === "wheel" ? [odd, 1 - odd] : scheme === "zigzag" ? [0, 0] : [odd, odd];
  const outward = side === "R" ? 1 : 0;
  const result = scheme === "blocks" ? odd : 0;
  for (let bits = 0; bits < 16; bits++)
    all.push({
      polarity: outward ^ (bits & 1), left: left ^ ((bits >> 1) & 1), right: right ^ ((bits >> 2) & 1),
      result: result ^ ((bits >> 3) & 1),
    });
  return all;
}

/** Frames of all faces, by leaf name and product key, and the products' boxes. */
export function layOut(
  trees: readonly Tree[],
  shapes: ReadonlyMap<string, Shape>,
  options: {
    readonly scheme: Scheme;
    readonly gap: number;
    readonly scatter: number;
    readonly places?: Readonly<Record<string, Place>>;
  },
): Layout {
  const frames = new Map<string, Frame[]>();
  const boxes: Box[] = [];
  const taken: Bounds[] = [];
  const { gap, scatter } = options;
  const put = (name: string, frame: Frame): void => {
    frames.set(name, [...(frames.get(name) ?? []), frame]);
  };
  const extent: [number[], number[]] = [[Infinity, Infinity, Infinity], [-Infinity, -Infinity, -Infinity]];
  const cover = (frame: Frame) => {
    for (const point of [frame.origin, elementAt(frame, frame.shape[0] - 1, frame.shape[1] - 1)])
      for (let axis = 0; axis < 3; axis++) {
        extent[0][axis] = Math.min(extent[0][axis]!, point[axis]!);
        extent[1][axis] = Math.max(extent[1][axis]!, point[axis]!);
      }
  };

  const visit = (tree: Tree, frame: Frame, level: number, side: "L" | "R" | "", away: Vec): void => {
    cover(frame);
    if (tree.kind === "leaf") return put(tree.name, frame);
    put(tree.key, frame);
    const depth = shapes.get(tree.left.kind === "leaf" ? tree.left.name : tree.left.key)![1];
    const custom = options.places && Object.hasOwn(options.places, tree.key) ? options.places[tree.key] : undefined;
    const wanted = custom ? [custom] : preferences(options.scheme, level, side);
    // A box outside of its parent's comes first; of those, the first that overlaps nothing.
    const outside = (choice: Place) => {
      const normal = scale(cross(frame.row, frame.col), choice.polarity ? -1 : 1);
      return normal[0] * away[0] + normal[1] * away[1] + normal[2] * away[2] >= 0;
    };
    const ordered = custom || options.scheme === "wheel" ? wanted : [...wanted].sort((a, b) => +outside(b) - +outside(a));
    const candidates = ordered.map((choice) => place(tree, frame, depth, gap, choice));
    const box = candidates.find((each) => !taken.some((other) => overlap(bounds(each), other))) ?? candidates[0]!;
    boxes.push(box);
    taken.push(bounds(box));
    const apart = (argument: Frame, direction: Vec): Frame =>
      scatter ? { ...argument, origin: add(argument.origin, direction, scatter) } : argument;
    const toLeft = scale(frame.col, box.place.left ? 1 : -1);
    const toRight = scale(frame.row, box.place.right ? 1 : -1);
    visit(tree.left, apart(box.left, toLeft), level + 1, "L", toLeft);
    visit(tree.right, apart(box.right, toRight), level + 1, "R", toRight);
  };

  let x = 0;
  for (const tree of trees) {
    const shape = shapes.get(tree.kind === "leaf" ? tree.name : tree.key)!;
    const first = boxes.length;
    const before: Vec = [extent[1][0]!, 0, 0];
    const dry = new Set(frames.keys());
    // The statements stand side by side: place one at the origin, then move it beside those before.
    const own: [number[], number[]] = [[...extent[0]], [...extent[1]]];
    extent[0] = [Infinity, Infinity, Infinity];
    extent[1] = [-Infinity, -Infinity, -Infinity];
    taken.length = 0;
    const counts = new Map([...frames].map(([name, list]) => [name, list.length]));
    visit(tree, { origin: [0, 0, 0], row: [0, -1, 0], col: [1, 0, 0], shape }, 0, "", [0, 0, 0]);
    const space = trees.length > 1 ? Math.max(4, 2 * gap) : 0;
    const shift: Vec = [x - extent[0][0]!, 0, 0];
    if (trees.length > 1) {
      for (const [name, list] of frames)
        frames.set(name, list.map((frame, at) =>
          at < (dry.has(name) ? counts.get(name)! : 0) ? frame : { ...frame, origin: add(frame.origin, shift) }));
      for (let at = first; at < boxes.length; at++) {
        const move = (frame: Frame): Frame => ({ ...frame, origin: add(frame.origin, shift) });
        const box = boxes[at]!;
        boxes[at] = {
          ...box, result: move(box.result), left: move(box.left), right: move(box.right), inner: add(box.inner, shift),
        };
      }
      x += extent[1][0]! - extent[0][0]! + 1 + space;
      extent[0][0] = Math.min(own[0][0]!, extent[0][0]! + shift[0]);
      extent[1][0] = Math.max(before[0] === -Infinity ? -Infinity : before[0], extent[1][0]! + shift[0]);
      for (const axis of [1, 2]) {
        extent[0][axis] = Math.min(own[0][axis]!, extent[0][axis]!);
        extent[1][axis] = Math.max(own[1][axis]!, extent[1][axis]!);
      }
    }
  }
  return { frames, boxes, low: extent[0] as unknown as Vec, high: extent[1] as unknown as Vec };
}

/** Pairs of boxes that overlap; a scheme should leave none. */
export function collisions(layout: Layout): [string, string][] {
  const found: [string, string][] = [];
  layout.boxes.forEach((a, at) =>
    layout.boxes.slice(at + 1).forEach((b) => {
      if (overlap(bounds(a), bounds(b))) found.push([a.node.key, b.node.key]);
    }),
  );
  return found;
}
