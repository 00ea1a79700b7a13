/** Lines and signs around the points: outlines, row guides, block borders, and the arrow with its vanes. */

import * as THREE from "three";
import { corners } from "./camera";
import { add, elementAt, scale, type Box, type Frame, type Vec } from "./geometry";

export interface GuideColours {
  readonly line: number;
  readonly row: number;
  readonly block: number;
  readonly left: number;
  readonly right: number;
  readonly text: string;
  readonly halo: string;
}

export function outlines(frames: readonly Frame[], colours: GuideColours): THREE.LineSegments {
  const points: number[] = [];
  for (const frame of frames) {
    const four = corners(frame);
    four.forEach((corner, at) => points.push(...corner, ...four[(at + 1) % 4]!));
  }
  return lines(points, colours.line, 0.5);
}

/** Faint lines along some rows show which way the rows run. */
export function rowGuides(frames: readonly Frame[], colours: GuideColours): THREE.LineSegments {
  const points: number[] = [];
  for (const frame of frames) {
    const [i, j] = frame.shape;
    const every = Math.max(1, Math.round(i / 4));
    for (let row = every; row < i; row += every)
      points.push(...elementAt(frame, row - 0.5, -0.6), ...elementAt(frame, row - 0.5, j - 0.4));
  }
  return lines(points, colours.row, 0.28);
}

export function blockBorders(
  frames: readonly (readonly [Frame, readonly [number, number]])[], colours: GuideColours,
): THREE.LineSegments {
  const points: number[] = [];
  for (const [frame, [rows, cols]] of frames) {
    const [i, j] = frame.shape;
    for (let at = 1; at < rows; at++) {
      const row = Math.min(i, at * Math.ceil(i / rows)) - 0.5;
      points.push(...elementAt(frame, row, -1.4), ...elementAt(frame, row, j + 0.4));
    }
    for (let at = 1; at < cols; at++) {
      const col = Math.min(j, at * Math.ceil(j / cols)) - 0.5;
      points.push(...elementAt(frame, -1.4, col), ...elementAt(frame, i + 0.4, col));
    }
  }
  return lines(points, colours.block, 0.9);
}

function lines(points: number[], color: number, opacity: number): THREE.LineSegments {
  const geometry = new THREE.BufferGeometry();
  geometry.setAttribute("position", new THREE.Float32BufferAttribute(points, 3));
  return new THREE.LineSegments(geometry, new THREE.LineBasicMaterial({ color, transparent: true, opacity }));
}

/** An arrow to the result inside the box, with a vane from each argument. */
export function arrow(box: Box, colours: GuideColours): THREE.Group {
  const [i, k, j] = box.size;
  const group = new THREE.Group();
  const middle = add(add(box.inner, box.result.row, (i - 1) / 2), box.result.col, (j - 1) / 2);
  const nearest = box.place.result ? k - 1 : 0;
  const length = Math.max(1, 0.62 * (k - 1));
  const to = add(middle, box.depth, nearest);
  const sign = box.place.result ? -1 : 1;
  const from = add(to, box.depth, sign * length);
  const reach = 0.16 * Math.min(Math.max(i, 2), Math.max(j, 2), 2 * length);
  const leftward = scale(box.result.col, box.place.left ? reach : -reach);
  const rightward = scale(box.result.row, box.place.right ? reach : -reach);
  const vane = (side: Vec, color: number) => {
    const geometry = new THREE.BufferGeometry();
    const tip = add(to, box.depth, sign * 0.3 * length);
    geometry.setAttribute("position", new THREE.Float32BufferAttribute([...tip, ...from, ...add(from, side)], 3));
    const material = new THREE.MeshBasicMaterial({
      color, side: THREE.DoubleSide, transparent: true, opacity: 0.75, depthWrite: false,
    });
    group.add(new THREE.Mesh(geometry, material));
  };
  vane(leftward, colours.left);
  vane(rightward, colours.right);
  const head = 0.5 * reach;
  const back = add(to, box.depth, sign * 2 * head);
  const wing = (side: Vec) => add(back, side, head / reach);
  group.add(
    lines(
      [...from, ...to, ...to, ...wing(leftward), ...to, ...wing(scale(leftward, -1)), ...to, ...wing(rightward), ...to, ...wing(scale(rightward, -1))],
      colours.line, 0.9,
    ),
  );
  return group;
}

export function disposeAll(root: THREE.Object3D): void {
  root.traverse((each) => {
    const { geometry, material } = each as THREE.Mesh;
    if (geometry && !(each instanceof THREE.Sprite)) geometry.dispose();
    for (const one of [material].flat())
      if (one) {
        (one as THREE.SpriteMaterial).map?.dispose();
        one.dispose();
      }
  });
}
