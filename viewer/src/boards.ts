/** Flat pages: all heads of a model, and the pages of a cache; what they are made of. */

import { tensor } from "./remote";
import type { Matrix } from "./values";

type Child = Node | string;
type Props = Record<string, unknown>;

/** An element; texts become text nodes, never markup. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in element && !name.includes("-")) (element as unknown as Props)[name] = value;
    else element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** A board and its description. */
export interface Shown {
  readonly element: HTMLElement;
  readonly words: string;
}

/** A matrix with `width` × `height` pixels an element: blue above 0, orange below. */
export function picture(matrix: Matrix, width: number, height: number, dark: boolean, label: string): HTMLCanvasElement {
  const canvas = h("canvas", { width: matrix.cols, height: matrix.rows, role: "img", "aria-label": label });
  canvas.style.width = `${matrix.cols * width}px`;
  canvas.style.height = `${matrix.rows * height}px`;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(matrix.cols, matrix.rows);
  const top = matrix.data.reduce((most, x) => Math.max(most, Math.abs(x)), 0) || 1;
  const ground = dark ? [13, 17, 23] : [251, 252, 254];
  matrix.data.forEach((x, at) => {
    const t = Math.sqrt(Math.abs(x) / top);
    const full = x >= 0 ? (dark ? [88, 166, 255] : [11, 95, 208]) : dark ? [255, 140, 66] : [194, 65, 12];
    for (let c = 0; c < 3; c++) image.data[4 * at + c] = ground[c]! + (full[c]! - ground[c]!) * t;
    image.data[4 * at + 3] = 255;
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

const rowsOf = (matrix: Matrix, start: number, count: number): Matrix => ({
  rows: count, cols: matrix.cols, data: matrix.data.slice(start * matrix.cols, (start + count) * matrix.cols),
});

export async function headsBoard(board: any, dark: boolean, link: (layer: number, head: number) => Promise<string>): Promise<Shown> {
  const grid = h("div", { className: "heads" }, h("span", {}, "head"));
  grid.style.gridTemplateColumns = `auto repeat(${board.heads}, auto)`;
  for (let head = 0; head < board.heads; head++) grid.append(h("span", { className: "number" }, String(head)));
  for (let layer = 0; layer < board.layers; layer++) {
    const maps = await tensor({ run: board.run, layer, head: -1, name: "heads" }, { parts: 1 });
    grid.append(h("span", {}, `layer ${layer}`));
    const side = maps.rows / board.heads;
    const pixels = Math.max(1, Math.round(56 / side));
    for (let head = 0; head < board.heads; head++) {
      const label = `layer ${layer}, head ${head}`;
      const shown = picture(rowsOf(maps, head * side, side), pixels, pixels, dark, label);
      grid.append(h("a", { href: `#${await link(layer, head)}`, title: label, "aria-label": label }, shown));
    }
  }
  const words = "Each picture is the attention of one head: a row for each token that looks, a column for each token that it looks at.";
  return { element: h("div", {}, h("p", { className: "quiet" }, `${words} Choose one to see it in space.`), grid), words };
}

export const table = (head: Child[], rows: Child[][]): HTMLTableElement =>
  h("table", {}, h("thead", {}, h("tr", {}, ...head.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((each) => h("td", {}, each))))));

/** The colour of a request's pages. */
const requestColour = (at: number, dark: boolean): string => `hsl(${(210 + at * 137.5) % 360} 70% ${dark ? 62 : 42}%)`;

export function cacheBoard(board: any, dark: boolean): Shown {
  const side = Math.max(6, Math.min(18, Math.round(900 / Math.sqrt(board.pages) / 8)));
  const columns = Math.max(8, Math.min(64, Math.ceil(Math.sqrt(board.pages * 2))));
  const counts = `${board.used} of ${board.pages} pages of ${board.page_tokens} tokens are in use, ${board.cached.length} are kept for shared prefixes.`;
  const canvas = h("canvas", {
    width: columns * side, height: Math.ceil(board.pages / columns) * side, role: "img", "aria-label": counts,
  });
  const context = canvas.getContext("2d")!;
  const paint = (page: number, style: string) => {
    context.fillStyle = style;
    context.fillRect((page % columns) * side, Math.floor(page / columns) * side, side - 1, side - 1);
  };
  for (let page = 0; page < board.pages; page++) paint(page, dark ? "#232b36" : "#e4e8ee");
  for (const page of board.cached) paint(page, dark ? "#6b788b" : "#98a3b0");
  board.requests.forEach((request: any, at: number) => {
    for (const page of request.pages) paint(page, requestColour(at, dark));
  });
  const swatch = (at: number) => {
    const square = h("span", { className: "swatch" });
    square.style.backgroundColor = requestColour(at, dark);
    return h("span", {}, square, String(board.requests[at].id));
  };
  const rows = board.requests.map((request: any, at: number) => [
    swatch(at), String(request.tokens), String(request.pages.length),
    request.pages.slice(0, 24).join(" ") + (request.pages.length > 24 ? " …" : ""),
  ]);
  const element = h("div", {},
    h("p", { className: "quiet" }, `${counts} A coloured square is a page of a request, a dark grey one is kept, a light one is free.`),
    canvas,
    rows.length ? table(["request", "tokens", "pages", "page table"], rows) : h("p", {}, "No request runs now."),
    h("p", { className: "quiet" }, board.merge));
  return { element, words: counts };
}
