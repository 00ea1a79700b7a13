/** The names of faces: of constant size on the screen, moved along their face so that none covers another. */

import * as THREE from "three";
import { corners } from "./camera";
import { elementAt, type Frame } from "./geometry";

const FONT_PIXELS = 14;
const PADDING = 4;
/** Places on a face in the order of preference, as shares of its rows and columns. */
const PLACES = [
  [0.5, 0.5], [0.5, 0.25], [0.5, 0.75], [0.25, 0.5], [0.75, 0.5], [0.12, 0.5], [0.88, 0.5], [0.5, 0.1], [0.5, 0.9],
  [0.2, 0.2], [0.8, 0.8], [0.2, 0.8], [0.8, 0.2],
] as const;
/** Shifts of a label whose face is too small for it, in its own heights. */
const SHIFTS = [[0, 0], [0, 1], [0, -1], [0.6, 0], [-0.6, 0]] as const;

interface Label {
  readonly sprite: THREE.Sprite;
  readonly frame: Frame;
  readonly named: boolean;
  readonly width: number;
  readonly height: number;
}
interface Rectangle {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

export const overlaps = (a: Rectangle, b: Rectangle): boolean =>
  a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;

export class Labels {
  private list: Label[] = [];
  group = new THREE.Group();

  add(frame: Frame, text: string, named: boolean, colour: string, halo: string, ratio: number): void {
    const canvas = document.createElement("canvas");
    const context = canvas.getContext("2d")!;
    const font = `600 ${FONT_PIXELS * ratio}px system-ui, sans-serif`;
    context.font = font;
    canvas.width = Math.ceil(context.measureText(text).width + 2 * PADDING * ratio);
    canvas.height = Math.ceil((FONT_PIXELS + 6) * ratio);
    context.font = font;
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.lineWidth = 4 * ratio;
    context.strokeStyle = halo;
    context.strokeText(text, PADDING * ratio, canvas.height / 2);
    context.fillStyle = colour;
    context.fillText(text, PADDING * ratio, canvas.height / 2);
    const map = new THREE.CanvasTexture(canvas);
    map.generateMipmaps = false;
    map.minFilter = THREE.LinearFilter;
    const sprite = new THREE.Sprite(new THREE.SpriteMaterial({ map, depthTest: false, transparent: true, sizeAttenuation: false }));
    sprite.renderOrder = 10;
    this.group.add(sprite);
    this.list.push({ sprite, frame, named, width: canvas.width / ratio, height: canvas.height / ratio });
  }

  /** Puts each label where it covers no other; named and small faces choose first. A label without a place is hidden. */
  place(camera: THREE.PerspectiveCamera, width: number, height: number): void {
    const project = (at: readonly [number, number, number]): THREE.Vector3 => {
      const p = new THREE.Vector3(...at).project(camera);
      return p.set(((p.x + 1) / 2) * width, ((1 - p.y) / 2) * height, p.z);
    };
    const area = (frame: Frame): number => {
      const [a, b, c, d] = corners(frame).map(project) as [THREE.Vector3, THREE.Vector3, THREE.Vector3, THREE.Vector3];
      return Math.abs((c.x - a.x) * (d.y - b.y) - (d.x - b.x) * (c.y - a.y)) / 2;
    };
    const unit = 2 / (camera.projectionMatrix.elements[5]! * Math.max(1, height));
    const taken: Rectangle[] = [];
    const order = this.list.map((label) => ({ label, size: area(label.frame) }));
    order.sort((a, b) => Number(b.label.named) - Number(a.label.named) || a.size - b.size);
    for (const { label } of order) {
      const { sprite, frame } = label;
      const [rows, cols] = frame.shape;
      sprite.scale.set(label.width * unit, label.height * unit, 1);
      sprite.visible = false;
      search: for (const [right, down] of SHIFTS)
        for (const [a, b] of PLACES) {
          const at = elementAt(frame, a * (rows - 1), b * (cols - 1));
          const p = project(at);
          if (p.z > 1) continue;
          const box = {
            x: p.x + right * label.width - label.width / 2, y: p.y + down * label.height - label.height / 2,
            width: label.width, height: label.height,
          };
          if (taken.some((other) => overlaps(other, box))) continue;
          taken.push(box);
          sprite.position.set(...at);
          sprite.center.set(0.5 - right, 0.5 + down);
          sprite.visible = true;
          break search;
        }
    }
    this.taken = taken;
  }
  /** Where labels are, in pixels. */
  taken: readonly Rectangle[] = [];

  clear(): void {
    this.list = [];
    this.group = new THREE.Group();
  }
}
