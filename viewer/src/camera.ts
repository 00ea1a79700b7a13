/** The camera of a scene: it orbits a target, and shows what is in focus as large as the free part of the window allows. */

import * as THREE from "three";
import { OrbitControls } from "three/examples/jsm/controls/OrbitControls.js";
import { cross, elementAt, type Frame, type Layout, type Vec } from "./geometry";
import { neighbourhood, type Picked } from "./picking";

export interface Insets {
  /** Pixels that the page's other parts cover at the top and at the bottom. */
  readonly top: number;
  readonly bottom: number;
}
const MARGIN = 0.93;
/** Rows and columns around an element that is brought near. */
const NEIGHBOURS = 10;

export const corners = (frame: Frame): Vec[] => {
  const [i, j] = frame.shape;
  return [elementAt(frame, -0.8, -0.8), elementAt(frame, -0.8, j - 0.2), elementAt(frame, i - 0.2, j - 0.2), elementAt(frame, i - 0.2, -0.8)];
};

/** The direction from the target to a camera at these angles [radians]. */
export const direction = (azimuth: number, height: number): THREE.Vector3 =>
  new THREE.Vector3(Math.sin(azimuth) * Math.cos(height), Math.sin(height), Math.cos(azimuth) * Math.cos(height));

/** The target and the distance from which a camera at these angles sees all points as large as they fit. */
export function fit(
  points: readonly Vec[], azimuth: number, height: number, camera: THREE.PerspectiveCamera, pixels: number, insets: Insets,
): { target: THREE.Vector3; distance: number } {
  const back = direction(azimuth, height);
  const right = new THREE.Vector3(Math.cos(azimuth), 0, -Math.sin(azimuth));
  const up = new THREE.Vector3().crossVectors(back, right);
  const vertical = Math.tan((camera.fov * Math.PI) / 360);
  const across = vertical * camera.aspect * MARGIN;
  const share = (covered: number) => vertical * (MARGIN - (2 * covered) / Math.max(1, pixels));
  let [above, below] = [share(insets.top), share(insets.bottom)];
  if (above + below < 0.4 * vertical) above = below = vertical * MARGIN; // too little is free in a small window
  // A point (x, y, z) is inside if x - cx <= across * (cz - z), and likewise at the other three sides.
  let [atRight, atLeft, atTop, atBottom] = [-Infinity, -Infinity, -Infinity, -Infinity];
  for (const point of points) {
    const p = new THREE.Vector3(...point);
    const [x, y, z] = [p.dot(right), p.dot(up), p.dot(back)];
    atRight = Math.max(atRight, x + across * z);
    atLeft = Math.max(atLeft, -x + across * z);
    atTop = Math.max(atTop, y + above * z);
    atBottom = Math.max(atBottom, -y + below * z);
  }
  const cz = Math.max((atRight + atLeft) / (2 * across), (atTop + atBottom) / (above + below));
  const cx = (atRight - atLeft) / 2;
  const cy = (atTop - above * cz + below * cz - atBottom) / 2;
  const depths = points.map((point) => new THREE.Vector3(...point).dot(back));
  const middle = (Math.min(...depths) + Math.max(...depths)) / 2;
  const target = right.multiplyScalar(cx).addScaledVector(up, cy).addScaledVector(back, middle);
  return { target, distance: Math.max(1, cz - middle) };
}

export class OrbitCamera {
  readonly perspective = new THREE.PerspectiveCamera(42, 1, 0.1, 10000);
  /** What covers the window above and below the drawing. */
  insets: Insets = { top: 0, bottom: 0 };
  /** When the user last moved it, by the page's clock [ms]. */
  movedAt = -Infinity;
  private readonly controls: OrbitControls;
  private layout: Layout = { frames: new Map(), boxes: [], low: [0, 0, 0], high: [0, 0, 0] };
  private focus = "";
  private start = "";
  private placing = false;

  /** Calls `onChange` at each change, and `onMove` where the user made it. */
  constructor(private readonly canvas: HTMLCanvasElement, private readonly onChange: () => void, private readonly onMove: () => void) {
    this.controls = new OrbitControls(this.perspective, canvas);
    this.controls.addEventListener("change", () => {
      this.onChange();
      if (this.placing) return;
      this.movedAt = performance.now();
      this.onMove();
    });
  }

  /** Shows a scene; `start` is the product that the camera is near at first, if any. */
  show(layout: Layout, start: string, focus: string, pose: readonly number[]): void {
    this.layout = layout;
    this.start = start;
    this.focus = focus;
    this.setPose(pose);
  }

  private get radius(): number {
    const { low, high } = this.layout;
    return Math.max(4, Math.hypot(high[0] - low[0], high[1] - low[1], high[2] - low[2]) / 2);
  }
  private get centre(): THREE.Vector3 {
    const { low, high } = this.layout;
    return new THREE.Vector3((low[0] + high[0]) / 2, (low[1] + high[1]) / 2, (low[2] + high[2]) / 2);
  }

  /** Azimuth, height, distance and target as the state has them; a distance of 0 shows the focus. */
  setPose(pose: readonly number[]): void {
    const [azimuth = 0, height = 0, distance = 0, x = 0, y = 0, z = 0] = pose;
    const target = this.centre.add(new THREE.Vector3(x, y, z).multiplyScalar(this.radius));
    if (distance > 0) return this.look(target, azimuth, height, distance * this.radius);
    this.fit(this.focused, azimuth, height);
  }

  /** The faces of the focus: one matrix, the page's first one with its arguments, or all. */
  private get focused(): readonly Frame[] {
    const own = this.layout.frames.get(this.focus);
    if (own) return [own[0]!];
    const start = this.focus === "" ? this.layout.boxes.find((box) => box.node.key === this.start) : undefined;
    return start ? [start.left, start.right, start.result] : [...this.layout.frames.values()].flat();
  }

  /** Looks at a matrix, or all of them, from these angles, as far away as needed. */
  setFocus(focus: string, [azimuth = 0, height = 0]: readonly number[]): void {
    this.focus = focus;
    this.fit(this.focused, azimuth, height);
  }

  private fit(frames: readonly Frame[], azimuth: number, height: number): void {
    const found = fit(frames.flatMap(corners), azimuth, height, this.perspective, this.canvas.clientHeight, this.insets);
    this.look(found.target, azimuth, height, found.distance);
  }

  private look(target: THREE.Vector3, azimuth: number, height: number, reach: number): void {
    this.controls.target.copy(target);
    this.perspective.position.copy(target).addScaledVector(direction(azimuth, height), reach);
    this.perspective.near = reach / 500;
    this.perspective.far = reach + this.radius * 50;
    this.perspective.updateProjectionMatrix();
    this.placing = true; // the user has moved nothing
    this.controls.update();
    this.placing = false;
    this.onChange();
  }

  /** Azimuth and height of the camera, turned to a face that is seen from its edge. */
  facing(key: string, frame = 0): [number, number] {
    const [azimuth, height] = this.pose as [number, number];
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
    this.onMove();
  }

  /** Azimuth, height, distance and target, as numbers that fit any scene of the same shape. */
  get pose(): number[] {
    const offset = this.perspective.position.clone().sub(this.controls.target);
    const spherical = new THREE.Spherical().setFromVector3(offset);
    const target = this.controls.target.clone().sub(this.centre).divideScalar(this.radius);
    const numbers = [spherical.theta, Math.PI / 2 - spherical.phi, spherical.radius / this.radius, ...target.toArray()];
    return numbers.map((each) => Math.round(each * 1e4) / 1e4);
  }

  /** Turns and moves the camera: keyboard. */
  move(turn: number, lift: number, zoom: number, right = 0, up = 0): void {
    const [azimuth, height, distance, x, y, z] = this.pose as [number, number, number, number, number, number];
    const side = new THREE.Vector3(right, up, 0).applyQuaternion(this.perspective.quaternion);
    const limited = Math.max(-1.5, Math.min(1.5, height + lift));
    this.setPose([azimuth + turn, limited, Math.max(1e-3, distance * zoom), x + side.x, y + side.y, z + side.z]);
    this.movedAt = performance.now();
    this.onMove();
  }
}
