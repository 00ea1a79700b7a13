/** The drawing of one scene: points, guides, sweeps, camera, and what is under the pointer. Drawn only on change. */

import * as THREE from "three";
import { OrbitControls } from "three/examples/jsm/controls/OrbitControls.js";
import { progress, schedule, type Schedule } from "./animation";
import { shown } from "./describe";
import { products, type Tree } from "./expression";
import { add, cross, elementAt, layOut, type Frame, type Layout } from "./geometry";
import { corners, direction, fit, type Insets } from "./camera";
import { arrow, blockBorders, disposeAll, outlines, rowGuides, type GuideColours } from "./guides";
import { Labels } from "./labels";
import { owners, propagate, type Blocks } from "./partition";
import { neighbourhood, pick, spotlight, type Picked } from "./picking";
import { magnitude, PointCloud, textureOf, type Palette } from "./points";
import type { State } from "./state";
import { needsRows, shapes, type Matrix } from "./values";

const SWEEPS = { rows: 1, columns: 2, outer: 3, dot: 4, "dot columns": 4, none: 0 } as const;

const DARK = { positive: 0x58a6ff, negative: 0xff8c42, faint: 0x2a3140, background: 0x0d1117 };
const LIGHT = { positive: 0x0b5fd0, negative: 0xc2410c, faint: 0xd5dbe5, background: 0xfbfcfe };
const GUIDES: Record<"dark" | "light", GuideColours> = {
  dark: { line: 0x8b98ac, row: 0xffffff, block: 0xf0f3f8, left: 0x388bfd, right: 0xf85149, text: "#e6edf3", halo: "rgba(13,17,23,.85)" },
  light: { line: 0x57606a, row: 0x24292f, block: 0x111418, left: 0x0969da, right: 0xcf222e, text: "#1f2328", halo: "rgba(251,252,254,.9)" },
};

/** Points of a scene in motion, where software draws it, and how long after a motion it is at rest. */
const MOVING_POINTS = 30_000;
const REST_MS = 500;
/** Rows and columns around an element that is brought near. */
const NEIGHBOURS = 10;

const keyOf = (tree: Tree): string => (tree.kind === "leaf" ? tree.name : tree.key);
THREE.ColorManagement.enabled = false; // colours are given as they are shown
const raw = (hex: number): THREE.Color => new THREE.Color(hex);

/** Whether the drawing is done by software, where multisampling is not worth its time. */
function software(): boolean {
  const context = document.createElement("canvas").getContext("webgl2");
  if (!context) return false;
  const info = context.getExtension("WEBGL_debug_renderer_info");
  const name = info ? String(context.getParameter(info.UNMASKED_RENDERER_WEBGL)) : "";
  context.getExtension("WEBGL_lose_context")?.loseContext();
  return /swiftshader|llvmpipe|software/i.test(name);
}

export class View {
  readonly renderer: THREE.WebGLRenderer;
  private readonly soft: boolean;
  readonly controls: OrbitControls;
  plan: Schedule = { phases: [], total: 0 };
  faces = new Map<string, Matrix>();
  onCamera: () => void = () => undefined;
  private readonly camera = new THREE.PerspectiveCamera(42, 1, 0.1, 10000);
  private readonly scene = new THREE.Scene();
  private root = new THREE.Group();
  private trees: readonly Tree[] = [];
  private layout: Layout = { frames: new Map(), boxes: [], low: [0, 0, 0], high: [0, 0, 0] };
  private state: State | null = null;
  private start = "";
  private readonly textures = new Map<string, THREE.DataTexture>();
  private clouds = new Map<string, PointCloud[]>();
  private sweeps: PointCloud[] = [];
  private partial = new Map<string, { sum: Matrix; done: number; texture: THREE.DataTexture }>();
  private tops = new Map<string, number>();
  private marker: THREE.LineSegments | null = null;
  readonly labels = new Labels();
  /** What covers the window above and below the drawing. */
  insets: Insets = { top: 0, bottom: 0 };
  private stale = true;

  constructor(private readonly canvas: HTMLCanvasElement) {
    this.soft = software();
    this.renderer = new THREE.WebGLRenderer({ canvas, antialias: !this.soft, powerPreference: "high-performance" });
    this.renderer.setPixelRatio(this.soft ? 1 : Math.min(2, window.devicePixelRatio));
    this.renderer.outputColorSpace = THREE.LinearSRGBColorSpace;
    this.controls = new OrbitControls(this.camera, canvas);
    this.controls.addEventListener("change", () => {
      this.dirty = true;
      if (this.placing) return;
      this.movedAt = performance.now();
      this.onCamera();
    });
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement!);
    this.resize();
  }

  get radius(): number {
    const { low, high } = this.layout;
    return Math.max(4, Math.hypot(high[0] - low[0], high[1] - low[1], high[2] - low[2]) / 2);
  }
  private get centre(): THREE.Vector3 {
    const { low, high } = this.layout;
    return new THREE.Vector3((low[0] + high[0]) / 2, (low[1] + high[1]) / 2, (low[2] + high[2]) / 2);
  }

  /** Called when there is something to draw. */
  onChange: () => void = () => undefined;
  private get dirty(): boolean {
    return this.stale;
  }
  private set dirty(stale: boolean) {
    this.stale = stale;
    if (stale) this.onChange();
  }
  /** Whether a motion has thinned the scene, which will be drawn again at rest. */
  get settling(): boolean {
    return this.moving;
  }

  private resize(): void {
    const { clientWidth, clientHeight } = this.canvas.parentElement!;
    this.renderer.setSize(clientWidth, clientHeight, false);
    this.camera.aspect = clientWidth / Math.max(1, clientHeight);
    this.camera.updateProjectionMatrix();
    this.dirty = true;
  }

  /** Shows a scene whose faces are known; `start` is the product that the camera is near at first, if any. */
  show(trees: readonly Tree[], state: State, faces: Map<string, Matrix>, dark: boolean, start: string): void {
    this.clear();
    this.trees = trees;
    this.state = state;
    this.start = start;
    this.faces = faces;
    const sizes = shapes(trees, state.leaves);
    this.layout = layOut(trees, sizes, state);
    this.plan = schedule(trees, sizes, state.anim, state.fuse, state.nodes);
    const colours = dark ? DARK : LIGHT;
    this.scene.background = raw(colours.background);
    const palette: Palette = { positive: raw(colours.positive), negative: raw(colours.negative), faint: raw(colours.faint) };
    const drawn = [...this.layout.frames.keys()];
    for (const key of drawn) this.tops.set(key, magnitude(faces.get(key)!));
    const global = Math.max(...this.tops.values());
    const top = (own: number) =>
      state.sensitivity === "local" ? own : state.sensitivity === "global" ? global : Math.sqrt(own * global);
    const blocks = this.blocks();
    const ranks = owners(trees, state.letters, state.plan);
    for (const key of drawn) {
      const matrix = faces.get(key)!;
      const texture = textureOf(matrix);
      this.textures.set(key, texture);
      const [rows, cols] = blocks.get(key) ?? [1, 1];
      const planned = Object.keys(state.plan).length > 0;
      const owner = ranks.get(key)!;
      const list = this.layout.frames.get(key)!.map((frame) => {
        const cloud = new PointCloud(palette);
        cloud.show(frame, 0);
        cloud.set("left", texture);
        cloud.set("right", texture);
        cloud.set("size", [matrix.rows, 1, matrix.cols]);
        cloud.set("top", top(this.tops.get(key)!));
        if (state.colour === "rank")
          cloud.set("owner", planned ? [rows, cols, owner.rowStride, owner.colStride] : [rows, cols, cols, 1]);
        this.root.add(cloud.object);
        return cloud;
      });
      this.clouds.set(key, list);
    }
    this.addGuides(dark, blocks);
    this.addSweeps(palette, top);
    this.scene.add(this.root);
    this.setCamera(state.camera);
    this.setCursor(state.cursor);
  }

  private blocks(): Map<string, Blocks> {
    const state = this.state!;
    if (Object.keys(state.plan).length === 0) return propagate(this.trees, state.nodes);
    return new Map([...owners(this.trees, state.letters, state.plan)].map(([key, owner]) => [key, owner.blocks]));
  }

  private addGuides(dark: boolean, blocks: Map<string, Blocks>): void {
    const state = this.state!;
    const colours = GUIDES[dark ? "dark" : "light"];
    const all = [...this.layout.frames];
    const frames = all.flatMap(([, list]) => list);
    const split = all.flatMap(([key, list]) => list.map((frame) => [frame, blocks.get(key) ?? [1, 1]] as const));
    if (split.some(([, [rows, cols]]) => rows * cols > 1)) this.root.add(blockBorders(split, colours));
    if (state.guides) {
      this.root.add(outlines(frames, colours), rowGuides(frames, colours));
      for (const box of this.layout.boxes) this.root.add(arrow(box, colours));
    }
    if (state.legends) {
      const names = new Map(this.trees.flatMap(products).map((node) => [node.key, shown(node)]));
      for (const [key, list] of all)
        for (const frame of list) {
          const name = names.get(key) ?? key;
          // Many names would hide the faces: then without sizes.
          const text = frames.length <= 5 ? `${name}  ${frame.shape[0]} × ${frame.shape[1]}` : name;
          this.labels.add(frame, text, !key.startsWith("@"), colours.text, colours.halo, this.renderer.getPixelRatio());
        }
    }
    this.root.add(this.labels.group);
  }

  private addSweeps(palette: Palette, top: (own: number) => number): void {
    for (const box of this.layout.boxes) {
      const cloud = new PointCloud(palette);
      cloud.set("left", this.textures.get(keyOf(box.node.left)));
      cloud.set("right", this.textures.get(keyOf(box.node.right)));
      cloud.set("size", box.size);
      const product = this.tops.get(keyOf(box.node.left))! * this.tops.get(keyOf(box.node.right))!;
      cloud.set("top", top(product));
      cloud.object.visible = false;
      this.sweeps.push(cloud);
      this.root.add(cloud.object);
    }
  }

  /** Shows the scene after `cursor` steps of its animation. */
  setCursor(cursor: number): void {
    this.dirty = true;
    const done = progress(this.plan, cursor);
    this.layout.boxes.forEach((box, at) => {
      const each = done.get(box.node.key);
      const sweep = this.sweeps[at]!;
      const clouds = this.clouds.get(box.node.key)!;
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
  private setPartial(key: string, done: number, [i, k, j]: readonly [number, number, number], clouds: PointCloud[]): void {
    const box = this.layout.boxes.find((each) => each.node.key === key)!;
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
      const left = this.faces.get(keyOf(box.node.left))!.data;
      const right = this.faces.get(keyOf(box.node.right))!.data;
      for (; partial.done < done; partial.done++)
        for (let a = 0; a < i; a++) {
          const x = left[a * k + partial.done]!;
          for (let b = 0; b < j; b++) partial.sum.data[a * j + b]! += x * right[partial.done * j + b]!;
        }
      (partial.texture.image.data as Float32Array).set(partial.sum.data);
      partial.texture.needsUpdate = true;
    }
    for (const cloud of clouds) cloud.set("left", complete ? this.textures.get(key) : partial!.texture);
    const epilogue = this.state!.nodes[key]?.epilogue;
    if (!complete && needsRows(epilogue))
      for (const cloud of clouds) cloud.set("top", magnitude(partial!.sum));
    else for (const cloud of clouds) cloud.set("top", this.tops.get(key));
  }

  /** Azimuth, height, distance and target as in the state; a distance of 0 shows the focus. */
  setCamera(camera: readonly number[]): void {
    const [azimuth = 0, height = 0, distance = 0, x = 0, y = 0, z = 0] = camera;
    const target = this.centre.add(new THREE.Vector3(x, y, z).multiplyScalar(this.radius));
    if (distance > 0) return this.look(target, azimuth, height, distance * this.radius);
    this.fit(this.focused, azimuth, height);
  }

  /** The faces of the focus: one matrix, the page's first one with its arguments, or all. */
  private get focused(): readonly Frame[] {
    const { focus } = this.state!;
    const own = this.layout.frames.get(focus);
    if (own) return [own[0]!];
    const start = focus === "" ? this.layout.boxes.find((box) => box.node.key === this.start) : undefined;
    return start ? [start.left, start.right, start.result] : [...this.layout.frames.values()].flat();
  }

  /** Looks at a matrix, or all of them, from these angles, as far away as needed. */
  setFocus(focus: string, [azimuth = 0, height = 0]: readonly number[]): void {
    this.state = { ...this.state!, focus };
    this.fit(this.focused, azimuth, height);
  }

  private fit(frames: readonly Frame[], azimuth: number, height: number): void {
    const found = fit(frames.flatMap(corners), azimuth, height, this.camera, this.canvas.clientHeight, this.insets);
    this.look(found.target, azimuth, height, found.distance);
  }

  private look(target: THREE.Vector3, azimuth: number, height: number, reach: number): void {
    this.controls.target.copy(target);
    this.camera.position.copy(target).addScaledVector(direction(azimuth, height), reach);
    this.camera.near = reach / 500;
    this.camera.far = reach + this.radius * 50;
    this.camera.updateProjectionMatrix();
    this.placing = true; // the user has moved nothing
    this.controls.update();
    this.placing = false;
    this.dirty = true;
  }
  private placing = false;

  /** Whether a matrix is a face of the scene; biases and angles are not. */
  shows(key: string): boolean {
    return this.layout.frames.has(key);
  }

  /** Azimuth and height of the camera, turned to a face that is seen from its edge. */
  facing(key: string, frame = 0): [number, number] {
    const [azimuth, height] = this.getCamera() as [number, number];
    const { row, col } = this.layout.frames.get(key)![frame]!;
    const normal = new THREE.Vector3(...cross(row, col));
    const towards = direction(azimuth, height).dot(normal);
    if (Math.abs(towards) >= 0.4) return [azimuth, height];
    const turned = direction(azimuth, height).addScaledVector(normal, (towards < 0 ? -1 : 1) * 1.2).normalize();
    return [Math.atan2(turned.x, turned.z), Math.asin(turned.y)];
  }

  /** Brings an element near, with its neighbours. */
  approach({ key, i, j, frame }: Picked): void {
    this.fit([neighbourhood(this.layout.frames.get(key)![frame]!, i, j, NEIGHBOURS)], ...this.facing(key, frame));
    this.onCamera();
  }

  /** The camera as numbers that fit any scene of the same shape. */
  getCamera(): number[] {
    const offset = this.camera.position.clone().sub(this.controls.target);
    const spherical = new THREE.Spherical().setFromVector3(offset);
    const target = this.controls.target.clone().sub(this.centre).divideScalar(this.radius);
    const numbers = [spherical.theta, Math.PI / 2 - spherical.phi, spherical.radius / this.radius, ...target.toArray()];
    return numbers.map((each) => Math.round(each * 1e4) / 1e4);
  }

  /** Turns and moves the camera: keyboard. */
  move(turn: number, lift: number, zoom: number, right = 0, up = 0): void {
    const [azimuth, height, distance, x, y, z] = this.getCamera() as [number, number, number, number, number, number];
    const side = new THREE.Vector3(right, up, 0).applyQuaternion(this.camera.quaternion);
    const limited = Math.max(-1.5, Math.min(1.5, height + lift));
    this.setCamera([azimuth + turn, limited, Math.max(1e-3, distance * zoom), x + side.x, y + side.y, z + side.z]);
    this.movedAt = performance.now();
    this.onCamera();
  }

  /** The element under a point of the canvas, in device-independent pixels from its corner. */
  pick(x: number, y: number): Picked | null {
    const { clientWidth, clientHeight } = this.canvas;
    const ray = new THREE.Raycaster();
    ray.setFromCamera(new THREE.Vector2((x / clientWidth) * 2 - 1, 1 - (y / clientHeight) * 2), this.camera);
    return pick(ray.ray, this.layout.frames, this.faces);
  }

  /** Where an element of a face of a matrix is on the canvas; null behind the camera. */
  project(key: string, i: number, j: number, frame = 0): [number, number] | null {
    const at = new THREE.Vector3(...elementAt(this.layout.frames.get(key)![frame]!, i, j)).project(this.camera);
    return at.z > 1 ? null : [((at.x + 1) / 2) * this.canvas.clientWidth, ((1 - at.y) / 2) * this.canvas.clientHeight];
  }

  /** Puts the spotlight on an element, or takes it away. */
  mark(picked: Picked | null, dark: boolean): void {
    if (this.marker) {
      this.root.remove(this.marker);
      disposeAll(this.marker);
      this.marker = null;
    }
    this.dirty = true;
    if (!picked) return;
    this.marker = spotlight(this.layout.frames.get(picked.key)!, picked.i, picked.j, raw(dark ? 0xffe066 : 0x7a4d00));
    this.root.add(this.marker);
  }

  /** Draws if something has changed; returns whether it did. */
  draw(force = false): boolean {
    const moving = this.soft && performance.now() - this.movedAt < REST_MS;
    if (!this.dirty && !force && moving === this.moving) return false;
    if (moving !== this.moving) this.thin(moving);
    this.dirty = false;
    const pixels = (this.renderer.domElement.height / 2) * (this.state?.size ?? 1);
    for (const cloud of [...[...this.clouds.values()].flat(), ...this.sweeps]) cloud.set("pointSize", pixels);
    this.labels.place(this.camera, this.canvas.clientWidth, this.canvas.clientHeight);
    this.renderer.render(this.scene, this.camera);
    for (const dispose of this.retired.splice(0)) dispose();
    return true;
  }

  /** Without a GPU, a scene of many points is drawn with fewer and larger ones while the camera moves. */
  private thin(moving: boolean): void {
    this.moving = moving;
    const points = [...this.layout.frames.values()].flat().reduce((all, { shape: [rows, cols] }) => all + rows * cols, 0);
    const least = moving ? Math.max(1, Math.ceil(Math.sqrt(points / MOVING_POINTS))) : 1;
    for (const cloud of [...this.clouds.values()].flat()) cloud.thin(least);
  }
  private moving = false;
  private movedAt = -Infinity;
  /** Frees earlier scenes once the next one is drawn: their shader programs, which it shares, are not compiled again. */
  private readonly retired: (() => void)[] = [];

  /** Waits until what was drawn is complete. */
  finish(): void {
    const gl = this.renderer.getContext();
    gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
  }

  private clear(): void {
    this.moving = false;
    this.movedAt = -Infinity;
    this.scene.remove(this.root);
    const [root, textures] = [this.root, [...this.textures.values(), ...[...this.partial.values()].map(({ texture }) => texture)]];
    this.retired.push(() => {
      disposeAll(root);
      for (const texture of textures) texture.dispose();
    });
    this.labels.clear();
    this.textures.clear();
    this.partial.clear();
    this.clouds.clear();
    this.tops.clear();
    this.sweeps = [];
    this.marker = null;
    this.root = new THREE.Group();
  }
}
