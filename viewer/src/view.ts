/** The drawing of one scene: points, guides, labels, and what is under the pointer. Drawn only on change. */

import * as THREE from "three";
import { progress, schedule, type Schedule } from "./animation";
import { shown } from "./describe";
import { products, type Tree } from "./expression";
import { elementAt, layOut, type Layout } from "./geometry";
import { OrbitCamera } from "./camera";
import { arrow, blockBorders, disposeAll, outlines, rowGuides, type GuideColours } from "./guides";
import { Labels } from "./labels";
import { owners, propagate, type Blocks } from "./partition";
import { pick, spotlight, type Picked } from "./picking";
import { magnitude, PointCloud, textureOf, type Palette } from "./points";
import type { State } from "./state";
import { Sweeps } from "./sweeps";
import { shapes, type Matrix } from "./values";

const DARK = { positive: 0x58a6ff, negative: 0xff8c42, faint: 0x2a3140, background: 0x0d1117 };
const LIGHT = { positive: 0x0b5fd0, negative: 0xc2410c, faint: 0xd5dbe5, background: 0xfbfcfe };
const GUIDES: Record<"dark" | "light", GuideColours> = {
  dark: { line: 0x8b98ac, row: 0xffffff, block: 0xf0f3f8, left: 0x388bfd, right: 0xf85149, text: "#e6edf3", halo: "rgba(13,17,23,.85)" },
  light: { line: 0x57606a, row: 0x24292f, block: 0x111418, left: 0x0969da, right: 0xcf222e, text: "#1f2328", halo: "rgba(251,252,254,.9)" },
};

/** Points of a scene in motion, where software draws it, and how long after a motion it is at rest. */
const MOVING_POINTS = 30_000;
const REST_MS = 500;

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
  private readonly renderer: THREE.WebGLRenderer;
  private readonly soft: boolean;
  readonly camera: OrbitCamera;
  plan: Schedule = { phases: [], total: 0 };
  faces = new Map<string, Matrix>();
  onCamera: () => void = () => undefined;
  private readonly scene = new THREE.Scene();
  private root = new THREE.Group();
  private trees: readonly Tree[] = [];
  private layout: Layout = { frames: new Map(), boxes: [], low: [0, 0, 0], high: [0, 0, 0] };
  private state: State | null = null;
  private readonly textures = new Map<string, THREE.DataTexture>();
  private clouds = new Map<string, PointCloud[]>();
  private sweeps: Sweeps | null = null;
  private tops = new Map<string, number>();
  private marker: THREE.LineSegments | null = null;
  readonly labels = new Labels();
  private stale = true;

  constructor(private readonly canvas: HTMLCanvasElement) {
    this.soft = software();
    this.renderer = new THREE.WebGLRenderer({ canvas, antialias: !this.soft, powerPreference: "high-performance" });
    this.renderer.setPixelRatio(this.soft ? 1 : Math.min(2, window.devicePixelRatio));
    this.renderer.outputColorSpace = THREE.LinearSRGBColorSpace;
    this.camera = new OrbitCamera(canvas, () => (this.dirty = true), () => this.onCamera());
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement!);
    this.resize();
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
    this.camera.perspective.aspect = clientWidth / Math.max(1, clientHeight);
    this.camera.perspective.updateProjectionMatrix();
    this.dirty = true;
  }

  /** Shows a scene whose faces are known; `start` is the product that the camera is near at first, if any. */
  show(trees: readonly Tree[], state: State, faces: Map<string, Matrix>, dark: boolean, start: string): void {
    this.clear();
    this.trees = trees;
    this.state = state;
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
    const { layout: { boxes }, textures, clouds, tops } = this;
    this.sweeps = new Sweeps({ boxes, nodes: state.nodes, faces, textures, clouds, tops }, palette, top);
    for (const { object } of this.sweeps.points) this.root.add(object);
    this.scene.add(this.root);
    this.camera.show(this.layout, start, state.focus, state.camera);
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

  /** Shows the scene after `cursor` steps of its animation. */
  setCursor(cursor: number): void {
    this.dirty = true;
    this.sweeps?.show(progress(this.plan, cursor));
  }

  /** Whether a matrix is a face of the scene; biases and angles are not. */
  shows(key: string): boolean {
    return this.layout.frames.has(key);
  }

  /** The element under a point of the canvas, in device-independent pixels from its corner. */
  pick(x: number, y: number): Picked | null {
    const { clientWidth, clientHeight } = this.canvas;
    const ray = new THREE.Raycaster();
    ray.setFromCamera(new THREE.Vector2((x / clientWidth) * 2 - 1, 1 - (y / clientHeight) * 2), this.camera.perspective);
    return pick(ray.ray, this.layout.frames, this.faces);
  }

  /** Where an element of a face of a matrix is on the canvas; null behind the camera. */
  project(key: string, i: number, j: number, frame = 0): [number, number] | null {
    const at = new THREE.Vector3(...elementAt(this.layout.frames.get(key)![frame]!, i, j)).project(this.camera.perspective);
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
    const moving = this.soft && performance.now() - this.camera.movedAt < REST_MS;
    if (!this.dirty && !force && moving === this.moving) return false;
    if (moving !== this.moving) this.thin(moving);
    this.dirty = false;
    const pixels = (this.renderer.domElement.height / 2) * (this.state?.size ?? 1);
    for (const cloud of [...[...this.clouds.values()].flat(), ...(this.sweeps?.points ?? [])]) cloud.set("pointSize", pixels);
    this.labels.place(this.camera.perspective, this.canvas.clientWidth, this.canvas.clientHeight);
    this.renderer.render(this.scene, this.camera.perspective);
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
  /** Frees earlier scenes once the next one is drawn: their shader programs, which it shares, are not compiled again. */
  private readonly retired: (() => void)[] = [];

  /** Waits until what was drawn is complete. */
  finish(): void {
    const gl = this.renderer.getContext();
    gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
  }

  private clear(): void {
    this.moving = false;
    this.camera.movedAt = -Infinity;
    this.scene.remove(this.root);
    const { root, sweeps } = this;
    const textures = [...this.textures.values()];
    this.retired.push(() => {
      disposeAll(root);
      for (const texture of textures) texture.dispose();
      sweeps?.dispose();
    });
    this.labels.clear();
    this.textures.clear();
    this.clouds.clear();
    this.tops.clear();
    this.sweeps = null;
    this.marker = null;
    this.root = new THREE.Group();
  }
}
