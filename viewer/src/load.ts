/** Loads what a state shows: a scene of its own expression, or a page of the served model. */

import { cacheBoard, headsBoard, type Shown } from "./boards";
import type { Tokens } from "./describe";
import type { Tree } from "./expression";
import * as remote from "./remote";
import { routingBoard } from "./routing";
import { encode, type State } from "./state";
import { evaluate, type LeafSpec, type Matrix, type TensorRef } from "./values";

const BOARDS = ["heads", "routing", "cache"];

export interface Page {
  /** The title, and the scene, of a page of the model; null if the state has its own. */
  readonly part: Partial<State> | null;
  /** What the server sent for a flat page; null for a scene. */
  readonly board: any;
  /** The product that the page is near at first; "" for the whole scene. */
  readonly start: string;
  readonly pieces: Tokens["pieces"];
  readonly positions: Tokens["positions"];
}

export async function fetchPage(model: State["model"]): Promise<Page> {
  if (model.page === "") return { part: null, board: null, start: "", pieces: [], positions: {} };
  const { run, pieces } = model.page === "cache" ? { run: "", pieces: [] } : await remote.record(model.text);
  const scene = await remote.scene(model.page, run, model.layer, model.head, model.rank);
  if (BOARDS.includes(model.page)) {
    return { part: { title: scene.title, note: scene.note }, board: scene, start: "", pieces, positions: {} };
  }
  const { start = "", positions = {}, ...part } = scene;
  return { part, board: null, start, pieces, positions };
}

/** `linked` is the state that the links of a board start from. */
export async function drawBoard(board: any, state: State, dark: boolean, linked: State): Promise<Shown> {
  const { model, plan } = state;
  if (model.page === "heads") return headsBoard(board, dark, (layer, head) => encode({ ...linked, model: { ...model, page: "head", layer, head } }));
  return model.page === "routing" ? routingBoard(board, dark, plan.ep ?? 1) : cacheBoard(board, dark);
}

/** All matrices of a scene, by key; those of the model come from the server. */
export async function evaluateFaces(trees: readonly Tree[], { leaves, nodes }: State): Promise<Map<string, Matrix>> {
  const name = (ref: TensorRef) => `${ref.run} ${ref.layer} ${ref.head} ${ref.name}`;
  const refs = new Map(Object.values(leaves).flatMap((leaf) => (leaf.tensor ? [[name(leaf.tensor), leaf.tensor] as const] : [])));
  const found = new Map(await Promise.all([...refs].map(async ([key, ref]) => [key, await remote.tensor(ref)] as const)));
  return evaluate(trees, leaves, nodes, (ref: TensorRef, spec: LeafSpec) => {
    const matrix = found.get(name(ref))!;
    if (matrix.rows !== spec.rows || matrix.cols !== spec.cols) throw new Error(`the server's '${ref.name}' has another size`);
    return matrix;
  });
}
