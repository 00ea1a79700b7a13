/** The whole state of the page, checked on the way in, and its form in the URL.
 *
 * The part of the URL after "#" is "j" and base64url of JSON, or "z" and base64url of raw deflate where that is
 * shorter. Values that are the default are left out. Anything unexpected is an error, never code.
 */

import { KINDS, type Kind } from "./animation";
import { MAX_LENGTH } from "./expression";
import { SCHEMES, type Place, type Scheme } from "./geometry";
import type { Letters, PlanSizes } from "./partition";
import { EPILOGUES, INITS, MAX_SIDE, type LeafSpec, type NodeSpec } from "./values";

export const SENSITIVITIES = ["local", "mixed", "global"] as const;
export const THEMES = ["auto", "light", "dark"] as const;
export const COLOURS = ["sign", "rank"] as const;
export const PAGES = ["", "head", "heads", "layer", "experts", "decode", "lora", "routing", "cache"] as const;
export type Page = (typeof PAGES)[number];
/** The focus of a view of all matrices. */
export const WHOLE = "*";

/** Where a scene of a loaded model comes from; the server builds the scene. */
export interface ModelPage {
  readonly page: Page;
  readonly text: string;
  readonly layer: number;
  readonly head: number;
  readonly rank: number;
}

export interface State {
  readonly expr: string;
  readonly leaves: Readonly<Record<string, LeafSpec>>;
  readonly nodes: Readonly<Record<string, NodeSpec>>;
  readonly places: Readonly<Record<string, Place>>;
  readonly letters: Readonly<Record<string, Letters>>;
  readonly plan: PlanSizes;
  readonly title: string;
  readonly note: string;
  readonly model: ModelPage;
  readonly scheme: Scheme;
  readonly gap: number;
  readonly scatter: number;
  readonly anim: Kind;
  readonly fuse: boolean;
  readonly speed: number;
  readonly cursor: number;
  readonly playing: boolean;
  readonly sensitivity: (typeof SENSITIVITIES)[number];
  readonly colour: (typeof COLOURS)[number];
  readonly size: number;
  readonly guides: boolean;
  readonly legends: boolean;
  readonly theme: (typeof THEMES)[number];
  /** Azimuth and height [radians], distance in scene radii (0: the focus fits), target relative to the centre. */
  readonly camera: readonly number[];
  /** The matrix that a camera without a distance shows; "": what the page starts with, WHOLE: the whole scene. */
  readonly focus: string;
  /** The step of the tour, 1 to 8; 0: not on the tour. */
  readonly tour: number;
}

export const DEFAULT: State = {
  expr: "C = A @ B",
  leaves: { A: { rows: 24, cols: 32 }, B: { rows: 32, cols: 24 } },
  nodes: {},
  places: {},
  letters: {},
  plan: {},
  title: "",
  note: "",
  model: { page: "", text: "", layer: 0, head: 0, rank: 8 },
  scheme: "blocks",
  gap: 4,
  scatter: 0,
  anim: "none",
  fuse: false,
  speed: 1,
  cursor: 0,
  playing: false,
  sensitivity: "local",
  colour: "sign",
  size: 1,
  guides: true,
  legends: true,
  theme: "auto",
  camera: [0.62, 0.42, 0, 0, 0, 0],
  focus: "",
  tour: 0,
};

export class StateError extends Error {}

type Check<T> = (value: unknown, at: string) => T;

const fail = (at: string, expected: string): never => {
  throw new StateError(`the link's '${at}' is not ${expected}`);
};
const number =
  (low: number, high: number, whole = false): Check<number> =>
  (value, at) =>
    typeof value === "number" && value >= low && value <= high && (!whole || Number.isInteger(value))
      ? value
      : fail(at, `a${whole ? " whole" : ""} number from ${low} to ${high}`);
const text =
  (length: number): Check<string> =>
  (value, at) =>
    typeof value === "string" && value.length <= length ? value : fail(at, `a text of at most ${length} characters`);
const flag: Check<boolean> = (value, at) => (typeof value === "boolean" ? value : fail(at, "true or false"));
const one =
  <T extends string>(choices: readonly T[]): Check<T> =>
  (value, at) =>
    choices.includes(value as T) ? (value as T) : fail(at, `one of ${choices.map((c) => `'${c}'`).join(", ")}`);
const list =
  <T>(item: Check<T>, length: number): Check<T[]> =>
  (value, at) =>
    Array.isArray(value) && value.length === length
      ? value.map((each, i) => item(each, `${at}.${i}`))
      : fail(at, `a list of ${length}`);
const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);
const MAX_ENTRIES = 256;
const record =
  <T>(item: Check<T>): Check<Record<string, T>> =>
  (value, at) => {
    if (!isObject(value) || Object.keys(value).length > MAX_ENTRIES) return fail(at, `at most ${MAX_ENTRIES} entries`);
    const found: Record<string, T> = {};
    for (const [key, each] of Object.entries(value)) {
      if (key.length > 80) fail(at, "a table with short names");
      Object.defineProperty(found, key, { value: item(each, `${at}.${key}`), enumerable: true });
    }
    return found;
  };
const object =
  <T>(fields: { [K in keyof T]-?: Check<NonNullable<T[K]>> }): Check<T> =>
  (value, at) => {
    if (!isObject(value)) return fail(at, "a table");
    const found: Partial<T> = {};
    for (const [key, each] of Object.entries(value)) {
      if (!Object.hasOwn(fields, key)) fail(`${at}.${key}`.slice(0, 100), "a known setting");
      found[key as keyof T] = fields[key as keyof T](each, `${at}.${key}`) as T[keyof T];
    }
    return found as T;
  };

const side = number(1, MAX_SIDE, true);
const name = text(64);
const blocks = number(1, 1024, true);
const finite = number(-1e6, 1e6);
const leaf = object<LeafSpec>({
  rows: side, cols: side, init: one(INITS), seed: number(0, 2 ** 31, true), low: finite, high: finite,
  blocks, sparsity: number(0, 1),
  tensor: object({ run: text(64), layer: number(-1, 4096, true), head: number(-1, 4096, true), name: text(32) }),
});
const node = object<NodeSpec>({
  epilogue: one(EPILOGUES), scale: finite, window: number(1, 1 << 20, true), plus: name, times: name, cos: name,
  sin: name, recorded: name, i: blocks, j: blocks, k: blocks,
});
const bit = number(0, 1, true);
const NEAR: Place = { polarity: 0, left: 0, right: 0, result: 0 };
const ranks = number(1, 4096, true);
const CHECKS: { [K in keyof State]-?: Check<State[K]> } = {
  expr: text(MAX_LENGTH),
  leaves: record((value, at) => {
    const found = leaf(value, at);
    if (found.rows === undefined || found.cols === undefined) fail(at, "a matrix with rows and cols");
    return found;
  }),
  nodes: record(node),
  places: record((value, at) => {
    const found = object<Partial<Place>>({ polarity: bit, left: bit, right: bit, result: bit })(value, at);
    return { ...NEAR, ...found };
  }),
  letters: record(list(text(2), 2) as unknown as Check<Letters>),
  plan: object<PlanSizes>({ pp: ranks, replicate: ranks, dp: ranks, cp: ranks, tp: ranks, ep: ranks }),
  title: text(200),
  note: text(1000),
  model: (value, at) => ({
    ...DEFAULT.model,
    ...object<ModelPage>({
      page: one(PAGES), text: text(20000), layer: number(0, 4096, true), head: number(0, 4096, true),
      rank: number(1, 1024, true),
    })(value, at),
  }),
  scheme: one(SCHEMES),
  gap: number(1, 64),
  scatter: number(0, 256),
  anim: one(KINDS),
  fuse: flag,
  speed: number(0.01, 10000),
  cursor: number(0, 2 ** 31, true),
  playing: flag,
  sensitivity: one(SENSITIVITIES),
  colour: one(COLOURS),
  size: number(0.1, 4),
  guides: flag,
  legends: flag,
  theme: one(THEMES),
  camera: list(number(-1e5, 1e5), 6),
  focus: text(80),
  tour: number(0, 8, true),
};

/** A state from untrusted JSON; throws StateError. */
export function checked(value: unknown): State {
  const found = object<Partial<State>>(CHECKS as { [K in keyof State]-?: Check<NonNullable<State[K]>> })(value, "state");
  return { ...DEFAULT, ...found };
}

/** The settings that differ from the default. */
export function compact(state: State): Partial<State> {
  return Object.fromEntries(
    Object.entries(state).filter(
      ([key, value]) => JSON.stringify(value) !== JSON.stringify(DEFAULT[key as keyof State]),
    ),
  );
}

export const MAX_URL = 64 * 1024;
export const MAX_STATE = 512 * 1024;
/** Shorter states stay readable JSON. */
const COMPRESS_FROM = 600;

function base64url(bytes: Uint8Array): string {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
function fromBase64url(source: string): Uint8Array<ArrayBuffer> {
  let binary: string;
  try {
    binary = atob(source.replaceAll("-", "+").replaceAll("_", "/"));
  } catch {
    throw new StateError("the link is damaged: it is not base64url");
  }
  return Uint8Array.from(binary, (char) => char.charCodeAt(0));
}

async function through(bytes: Uint8Array<ArrayBuffer>, stream: CompressionStream | DecompressionStream, limit: number): Promise<Uint8Array> {
  const writer = stream.writable.getWriter();
  const written = writer.write(bytes).then(() => writer.close());
  written.catch(() => undefined); // the reader reports it
  const parts: Uint8Array[] = [];
  let length = 0;
  const reader = stream.readable.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    length += value.length;
    if (length > limit) {
      await reader.cancel();
      throw new StateError(`the link holds more than ${limit} bytes`);
    }
    parts.push(value);
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** The state as the part of a URL after "#". */
export async function encode(state: State): Promise<string> {
  const bytes = new TextEncoder().encode(JSON.stringify(compact(state)));
  if (bytes.length < COMPRESS_FROM) return `j${base64url(bytes)}`;
  return `z${base64url(await through(bytes, new CompressionStream("deflate-raw"), MAX_STATE))}`;
}

/** The state of a URL's part after "#"; empty: the default. Throws StateError. */
export async function decode(hash: string): Promise<State> {
  if (hash === "") return DEFAULT;
  if (hash.length > MAX_URL) throw new StateError(`the link has more than ${MAX_URL} characters`);
  const kind = hash[0];
  if (kind !== "j" && kind !== "z") throw new StateError("the link is damaged: it starts with neither j nor z");
  let bytes = fromBase64url(hash.slice(1)) as Uint8Array;
  if (kind === "z") {
    try {
      bytes = await through(bytes as Uint8Array<ArrayBuffer>, new DecompressionStream("deflate-raw"), MAX_STATE);
    } catch (error) {
      throw error instanceof StateError ? error : new StateError("the link is damaged: it does not decompress");
    }
  }
  let value: unknown;
  try {
    value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    throw new StateError("the link is damaged: it is not JSON");
  }
  return checked(value);
}
