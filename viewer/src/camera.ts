/** The camera that shows a set of points: as near as possible, inside the part of the window that nothing covers. */

import * as THREE from "three";
import { elementAt, type Frame, type Vec } from "./geometry";

export interface Insets {
  /** Pixels that the page's other parts cover at the top and at the bottom. */
  readonly top: number;
  readonly bottom: number;
}
const MARGIN = 0.93;

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
