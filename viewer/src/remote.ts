/** The server behind the page, if there is one: recordings, scenes and tensors of a model. */

import type { Page } from "./state";
import type { Matrix, TensorRef } from "./values";

export interface ModelInfo {
  readonly model: string;
  readonly layers: number;
  readonly heads: number;
  readonly experts: number;
  readonly pages: readonly Page[];
  readonly text: string;
  readonly plan: string;
  readonly adapter: boolean;
}
export interface Recording {
  readonly run: string;
  readonly pieces: readonly string[];
}

export class RemoteError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** The operator's key, only in memory. */
let key = "";
export const setKey = (value: string): void => {
  key = value;
};

async function request(path: string, body?: unknown): Promise<Response> {
  const headers: Record<string, string> = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const init: RequestInit = { headers, credentials: "omit" };
  const answer = await fetch(`/v1/look/${path}`, body === undefined ? init : { ...init, method: "POST", body: JSON.stringify(body) });
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = String((await answer.json()).error.message);
  } catch {
    // not one of our errors: the status says it
  }
  throw new RemoteError(message, answer.status);
}

/** What the server has to show; null where there is none. */
export async function modelInfo(): Promise<ModelInfo | null> {
  try {
    const answer = await request("model");
    return (answer.headers.get("content-type") ?? "").startsWith("application/json") ? await answer.json() : null;
  } catch (error) {
    if (error instanceof RemoteError && (error.status === 401 || error.status === 403)) throw error;
    return null;
  }
}

export const record = async (text: string): Promise<Recording> => (await request("record", { text })).json();

export async function scene(page: Page, run: string, layer: number, head: number, rank: number): Promise<any> {
  const query = new URLSearchParams({ page, run, layer: String(layer), head: String(head), rank: String(rank) });
  return (await request(`scene?${query}`)).json();
}

/** float16 to number. */
export function half(bits: number): number {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
let table: Float32Array | null = null;
const halves = (): Float32Array => (table ??= Float32Array.from({ length: 65536 }, (_, bits) => half(bits)));

/** A tile: four bytes of length, a JSON header, and planes of float16, each a correction of those before. */
export function readTile(buffer: ArrayBuffer): Matrix {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const [rows, cols] = header.shape as [number, number];
  const count = rows * cols;
  const bits = new Uint16Array(buffer, header.offset as number, count * (header.parts as number));
  const value = halves();
  const data = new Float32Array(count);
  for (let part = 0, scale = header.scale as number; part < header.parts; part++, scale /= 2048)
    for (let at = 0; at < count; at++) data[at]! += scale * value[bits[part * count + at]!]!;
  return { rows, cols, data };
}

export async function tensor(ref: TensorRef, options: { reduce?: number; parts?: number } = {}): Promise<Matrix> {
  const query = new URLSearchParams({
    run: ref.run, layer: String(ref.layer), head: String(ref.head), name: ref.name, parts: String(options.parts ?? 2),
    reduce: String(options.reduce ?? 1),
  });
  return readTile(await (await request(`tensor?${query}`)).arrayBuffer());
}
