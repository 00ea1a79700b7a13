/** Which element of a face lies under a ray, and the spotlight on it. */

import * as THREE from "three";
import { add, cross, elementAt, type Frame, type Vec } from "./geometry";
import type { Matrix } from "./values";

export interface Picked {
  readonly key: string;
  readonly i: number;
  readonly j: number;
  readonly value: number;
  /** Which of the faces of the matrix: an argument of two products has two. */
  readonly frame: number;
}

const dot = (a: Vec, b: Vec): number => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];

/** The nearest element that the ray meets. */
export function pick(ray: THREE.Ray, frames: ReadonlyMap<string, readonly Frame[]>, faces: ReadonlyMap<string, Matrix>): Picked | null {
  const origin = ray.origin.toArray();
  const direction = ray.direction.toArray();
  let best: Picked | null = null;
  let nearest = Infinity;
  for (const [key, list] of frames)
    for (const [number, frame] of list.entries()) {
      const normal = cross(frame.row, frame.col);
      const along = dot(direction, normal);
      if (Math.abs(along) < 1e-9) continue;
      const distance = dot(add(frame.origin, origin, -1), normal) / along;
      if (distance <= 0 || distance >= nearest) continue;
      const offset = add(add(origin, direction, distance), frame.origin, -1);
      const i = Math.round(dot(offset, frame.row));
      const j = Math.round(dot(offset, frame.col));
      if (i < 0 || j < 0 || i >= frame.shape[0] || j >= frame.shape[1]) continue;
      best = { key, i, j, value: faces.get(key)!.data[i * frame.shape[1] + j]!, frame: number };
      nearest = distance;
    }
  return best;
}

/** Lines through an element of each face of its matrix. */
export function spotlight(frames: readonly Frame[], i: number, j: number, colour: THREE.Color): THREE.LineSegments {
  const points: number[] = [];
  for (const frame of frames) {
    const [rows, cols] = frame.shape;
    points.push(...elementAt(frame, i, -1), ...elementAt(frame, i, cols));
    points.push(...elementAt(frame, -1, j), ...elementAt(frame, rows, j));
  }
  const geometry = new THREE.BufferGeometry();
  geometry.setAttribute("position", new THREE.Float32BufferAttribute(points, 3));
  return new THREE.LineSegments(geometry, new THREE.LineBasicMaterial({ color: colour }));
}

/** The elements of a face that are at most `reach` rows and columns from (i, j), as a face. */
export function neighbourhood(frame: Frame, i: number, j: number, reach: number): Frame {
  const [top, left] = [Math.max(0, i - reach), Math.max(0, j - reach)];
  const [bottom, right] = [Math.min(frame.shape[0], i + reach + 1), Math.min(frame.shape[1], j + reach + 1)];
  return { ...frame, origin: elementAt(frame, top, left), shape: [bottom - top, right - left] };
}
