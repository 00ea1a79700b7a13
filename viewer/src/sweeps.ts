/** The animation of products: a sweep of partial products through each box, and the result as far as it is complete. */

import type { DataTexture } from "three";
import type { Progress } from "./animation";
import type { Tree } from "./expression";
import { add, type Box, type Frame } from "./geometry";
import { magnitude, PointCloud, textureOf, type Palette } from "./points";
import type { State } from "./state";
import { needsRows, type Matrix } from "./values";

const SWEEPS = { rows: 1, columns: 2, outer: 3, dot: 4, "dot columns": 4, none: 0 } as const;

const keyOf = (tree: Tree): string => (tree.kind === "leaf" ? tree.name : tree.key);

/** What a sweep needs of the scene; maps are by key of a matrix. */
export interface Swept {
  readonly boxes: readonly Box[];
  readonly nodes: State["nodes"];
  readonly faces: ReadonlyMap<string, Matrix>;
  readonly textures: ReadonlyMap<string, DataTexture>;
  readonly clouds: ReadonlyMap<string, readonly PointCloud[]>;
  /** Largest magnitudes. */
  readonly tops: ReadonlyMap<string, number>;
}

export class Sweeps {
  /** One for each box of the scene. */
  readonly points: PointCloud[] = [];
  private readonly partial = new Map<string, { sum: Matrix; done: number; texture: DataTexture }>();

  /** `top` is the magnitude that has the full colour, of a product with the largest magnitude `own`. */
  constructor(private readonly scene: Swept, palette: Palette, top: (own: number) => number) {
    for (const box of scene.boxes) {
      const cloud = new PointCloud(palette);
      cloud.set("left", scene.textures.get(keyOf(box.node.left)));
      cloud.set("right", scene.textures.get(keyOf(box.node.right)));
      cloud.set("size", box.size);
      const product = scene.tops.get(keyOf(box.node.left))! * scene.tops.get(keyOf(box.node.right))!;
      cloud.set("top", top(product));
      cloud.object.visible = false;
      this.points.push(cloud);
    }
  }

  /** Shows the scene as far as each product is done. */
  show(done: ReadonlyMap<string, Progress>): void {
    this.scene.boxes.forEach((box, at) => {
      const each = done.get(box.node.key);
      const sweep = this.points[at]!;
      const clouds = this.scene.clouds.get(box.node.key)!;
      sweep.object.visible = each?.active ?? false;
      if (!each) return;
      const [i, k, j] = box.size;
      const step = Math.max(0, each.done - 1);
      const show = (frame: Frame) => sweep.show(frame, SWEEPS[each.kind]);
      const start = box.inner;
      let limits: [number?, number?, number?, number?] = [];
      if (each.kind === "rows") {
        limits = [each.done];
        sweep.set("at", [step, 0]);
        show({ origin: add(start, box.result.row, step), row: box.depth, col: box.result.col, shape: [k, j] });
      } else if (each.kind === "columns") {
        limits = [undefined, each.done];
        sweep.set("at", [0, step]);
        show({ origin: add(start, box.result.col, step), row: box.result.row, col: box.depth, shape: [i, k] });
      } else if (each.kind === "outer") {
        this.setPartial(box.node.key, each.done, box.size, clouds);
        limits = each.done ? [] : [0];
        sweep.set("at", [step, 0]);
        show({ origin: add(start, box.depth, step), row: box.result.row, col: box.result.col, shape: [i, j] });
      } else {
        const byRow = each.kind === "dot";
        const [a, b] = byRow ? [Math.floor(step / j), step % j] : [step % i, Math.floor(step / i)];
        limits = byRow ? [undefined, undefined, each.done] : [undefined, undefined, undefined, each.done];
        sweep.set("at", [a, b]);
        const origin = add(add(start, box.result.row, a), box.result.col, b);
        show({ origin, row: box.depth, col: box.result.col, shape: [k, 1] });
      }
      for (const cloud of clouds) cloud.limit(...limits);
    });
  }

  /** Partial sums of outer products; the epilogue comes when the sum is complete. */
  private setPartial(key: string, done: number, [i, k, j]: readonly [number, number, number], clouds: readonly PointCloud[]): void {
    const box = this.scene.boxes.find((each) => each.node.key === key)!;
    const complete = done >= k;
    let partial = this.partial.get(key);
    if (!complete) {
      if (!partial) {
        const sum = { rows: i, cols: j, data: new Float32Array(i * j) };
        partial = { sum, done: 0, texture: textureOf(sum) };
        this.partial.set(key, partial);
      }
      if (partial.done > done) {
        partial.sum.data.fill(0);
        partial.done = 0;
      }
      const left = this.scene.faces.get(keyOf(box.node.left))!.data;
      const right = this.scene.faces.get(keyOf(box.node.right))!.data;
      for (; partial.done < done; partial.done++)
        for (let a = 0; a < i; a++) {
          const x = left[a * k + partial.done]!;
          for (let b = 0; b < j; b++) partial.sum.data[a * j + b]! += x * right[partial.done * j + b]!;
        }
      (partial.texture.image.data as Float32Array).set(partial.sum.data);
      partial.texture.needsUpdate = true;
    }
    for (const cloud of clouds) cloud.set("left", complete ? this.scene.textures.get(key) : partial!.texture);
    const epilogue = this.scene.nodes[key]?.epilogue;
    if (!complete && needsRows(epilogue))
      for (const cloud of clouds) cloud.set("top", magnitude(partial!.sum));
    else for (const cloud of clouds) cloud.set("top", this.scene.tops.get(key));
  }

  /** Frees the textures of partial sums. */
  dispose(): void {
    for (const { texture } of this.partial.values()) texture.dispose();
  }
}
