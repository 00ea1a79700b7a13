/** Points of faces and of sweeps. An instance draws a block of 512 points that are found by gl_VertexID; values are a
 * texture, so that a moving sweep changes uniforms only. */

import * as THREE from "three";
import type { Frame } from "./geometry";
import type { Matrix } from "./values";

const BLOCK = 512;
const WIDTH = 2048;
/** Faces with more points are drawn with every n-th row and column. */
export const MAX_POINTS = 400_000;

export interface Palette {
  readonly positive: THREE.Color;
  readonly negative: THREE.Color;
  readonly faint: THREE.Color;
}

const VERTEX = /* glsl */ `
precision highp float;
precision highp int;
uniform mat4 modelViewMatrix;
uniform mat4 projectionMatrix;
uniform highp sampler2D left;
uniform highp sampler2D right;
uniform ivec2 shape;      // rows and columns that are drawn
uniform int stride;
uniform ivec3 size;       // i, k, j of the product; for a face (rows, 0, columns)
uniform int kind;         // 0 face, 1 row sweep, 2 column sweep, 3 outer, 4 dot
uniform ivec2 at;         // where the sweep is
uniform vec3 origin;
uniform vec3 rowStep;
uniform vec3 colStep;
uniform float top;
uniform float pointSize;
uniform ivec4 visible;    // rows, columns, elements in row order, elements in column order
uniform ivec4 owner;      // row blocks, column blocks, row stride, column stride; 0: colours by sign
uniform vec3 positive;
uniform vec3 negative;
uniform vec3 faint;
out vec3 colour;
flat out float across;

float leftAt(int i, int k) {
  int index = i * size.y + k;
  return texelFetch(left, ivec2(index % ${WIDTH}, index / ${WIDTH}), 0).r;
}
float rightAt(int k, int j) {
  int index = k * size.z + j;
  return texelFetch(right, ivec2(index % ${WIDTH}, index / ${WIDTH}), 0).r;
}
vec3 hue(float h) {
  return clamp(abs(fract(h + vec3(0.0, 2.0 / 3.0, 1.0 / 3.0)) * 6.0 - 3.0) - 1.0, 0.0, 1.0);
}
void main() {
  gl_Position = vec4(2.0, 2.0, 2.0, 1.0);
  gl_PointSize = 0.0;
  colour = faint;
  across = 0.0;
  int index = gl_InstanceID * ${BLOCK} + gl_VertexID;
  if (index >= shape.x * shape.y) return;
  int a = (index / shape.y) * stride;
  int b = (index % shape.y) * stride;
  float x;
  if (kind == 0) {
    if (a >= visible.x || b >= visible.y || a * size.z + b >= visible.z || b * size.x + a >= visible.w) return;
    int texel = a * size.z + b;
    x = texelFetch(left, ivec2(texel % ${WIDTH}, texel / ${WIDTH}), 0).r;
  } else if (kind == 1) x = leftAt(at.x, a) * rightAt(a, b);
  else if (kind == 2) x = leftAt(a, b) * rightAt(b, at.y);
  else if (kind == 3) x = leftAt(a, at.x) * rightAt(at.x, b);
  else x = leftAt(at.x, a) * rightAt(a, at.y);
  float t = min(abs(x) / top, 1.0);
  if (t < 0.004) return;
  t = sqrt(t);
  vec3 full = x > 0.0 ? positive : negative;
  if (owner.x > 0) {
    int r = a / ((size.x + owner.x - 1) / owner.x);
    int c = b / ((size.z + owner.y - 1) / owner.y);
    float rank = float(r * owner.z + c * owner.w);
    full = owner.x * owner.y > 1 ? mix(hue(0.58 + rank * 0.381966), positive, 0.12) : vec3(0.62);
  }
  vec4 eye = modelViewMatrix * vec4(origin + float(a) * rowStep + float(b) * colStep, 1.0);
  gl_Position = projectionMatrix * eye;
  float wanted = float(stride) * pointSize * (0.2 + 0.62 * t) * projectionMatrix[1][1] / gl_Position.w;
  gl_PointSize = clamp(wanted, 1.0, 64.0);
  // Where points are smaller than a pixel, their brightness alone tells them apart.
  colour = mix(faint, full, mix(t, 0.25 + 0.75 * t, smoothstep(0.8, 2.5, wanted)));
  across = gl_PointSize;
}`;

const FRAGMENT = /* glsl */ `
precision mediump float;
in vec3 colour;
flat in float across;
out vec4 pixel;
void main() {
  vec2 off = gl_PointCoord - 0.5;
  if (across > 4.0 && dot(off, off) > 0.25) discard; // larger points are round
  pixel = vec4(colour, 1.0);
}`;

export function textureOf(matrix: Matrix): THREE.DataTexture {
  const count = matrix.data.length;
  const height = Math.max(1, Math.ceil(count / WIDTH));
  const data = new Float32Array(WIDTH * height);
  data.set(matrix.data);
  const texture = new THREE.DataTexture(data, WIDTH, height, THREE.RedFormat, THREE.FloatType);
  texture.needsUpdate = true;
  return texture;
}

export function magnitude(matrix: Matrix): number {
  let top = 0;
  let squares = 0;
  for (const x of matrix.data) {
    const size = Math.abs(x);
    if (size > top) top = size;
    squares += x * x;
  }
  // An outlier must not hide the rest.
  return Math.min(top, 4 * Math.sqrt(squares / matrix.data.length)) || 1;
}

const FAR = 0x7fffffff;

export class PointCloud {
  readonly object: THREE.Points;
  private readonly material: THREE.RawShaderMaterial;
  private readonly geometry: THREE.InstancedBufferGeometry;
  private frame: Frame | null = null;
  private least = 1;

  constructor(palette: Palette) {
    this.geometry = new THREE.InstancedBufferGeometry();
    this.geometry.setDrawRange(0, BLOCK);
    this.material = new THREE.RawShaderMaterial({
      glslVersion: THREE.GLSL3,
      vertexShader: VERTEX,
      fragmentShader: FRAGMENT,
      uniforms: {
        left: { value: null }, right: { value: null }, shape: { value: [0, 0] }, stride: { value: 1 },
        size: { value: [1, 1, 1] }, kind: { value: 0 }, at: { value: [0, 0] }, origin: { value: new THREE.Vector3() },
        rowStep: { value: new THREE.Vector3() }, colStep: { value: new THREE.Vector3() }, top: { value: 1 },
        pointSize: { value: 1 }, visible: { value: [FAR, FAR, FAR, FAR] }, owner: { value: [0, 1, 0, 0] },
        positive: { value: palette.positive }, negative: { value: palette.negative }, faint: { value: palette.faint },
      },
    });
    this.object = new THREE.Points(this.geometry, this.material);
    this.object.frustumCulled = false;
  }

  set(name: string, value: unknown): void {
    this.material.uniforms[name]!.value = value;
  }

  /** Draws a face or sweep; of more than MAX_POINTS, and while the scene is thinned, every n-th row and column. */
  show(frame: Frame, kind: number): void {
    this.frame = frame;
    this.set("kind", kind);
    (this.material.uniforms["origin"]!.value as THREE.Vector3).set(...frame.origin);
    (this.material.uniforms["rowStep"]!.value as THREE.Vector3).set(...frame.row);
    (this.material.uniforms["colStep"]!.value as THREE.Vector3).set(...frame.col);
    this.thin(this.least);
  }

  /** Draws at most every `least`-th row and column. */
  thin(least: number): void {
    this.least = least;
    if (!this.frame) return;
    const [rows, cols] = this.frame.shape;
    const stride = Math.max(least, Math.ceil(Math.sqrt((rows * cols) / MAX_POINTS)));
    const drawn = [Math.ceil(rows / stride), Math.ceil(cols / stride)];
    this.set("stride", stride);
    this.set("shape", drawn);
    this.geometry.instanceCount = Math.ceil((drawn[0]! * drawn[1]!) / BLOCK);
  }

  limit(rows = FAR, cols = FAR, rowOrder = FAR, colOrder = FAR): void {
    this.set("visible", [rows, cols, rowOrder, colOrder]);
  }
}
