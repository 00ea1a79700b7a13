/** Flat pages: all heads of a model, the routing of tokens to experts, the pages of a cache. */

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

function picture(matrix: Matrix, scale: number, dark: boolean, label: string): HTMLCanvasElement {
  const canvas = h("canvas", { width: matrix.cols, height: matrix.rows, role: "img", "aria-label": label });
  canvas.style.width = `${matrix.cols * scale}px`;
  canvas.style.height = `${matrix.rows * scale}px`;
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

export async function headsBoard(board: any, dark: boolean, link: (layer: number, head: number) => Promise<string>): Promise<HTMLElement> {
  const grid = h("div", { className: "heads" });
  grid.style.gridTemplateColumns = `auto repeat(${board.heads}, auto)`;
  for (let layer = 0; layer < board.layers; layer++) {
    grid.append(h("span", {}, `layer ${layer}`));
    const all = await tensor({ run: board.run, layer, head: -1, name: "heads" }, { parts: 1 });
    const side = all.rows / board.heads;
    for (let head = 0; head < board.heads; head++) {
      const label = `layer ${layer}, head ${head}`;
      const shown = picture(rowsOf(all, head * side, side), Math.max(1, Math.round(56 / side)), dark, label);
      grid.append(h("a", { href: `#${await link(layer, head)}`, title: label, "aria-label": label }, shown));
    }
  }
  return h("div", {}, h("p", { className: "quiet" }, "Who attends to whom, in every head; choose one to see it in space."), grid);
}

const table = (head: string[], rows: string[][]): HTMLTableElement =>
  h("table", {}, h("thead", {}, h("tr", {}, ...head.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((each) => h("td", {}, each))))));

export async function routingBoard(board: any, dark: boolean): Promise<HTMLElement> {
  const whole = h("div", {});
  for (const layer of board.layers) {
    const weights = await tensor({ run: board.run, layer: layer.layer, head: -1, name: "routing" }, { parts: 1 });
    const label = `Tokens (down) and experts (across) of layer ${layer.layer}`;
    whole.append(
      h("h2", {}, `Layer ${layer.layer}`),
      h("p", { className: "quiet" }, `entropy of the load ${layer.entropy.toFixed(2)} of ${Math.log(board.experts).toFixed(2)} nats, ${layer.dropped} of ${layer.choices} choices dropped`),
      picture(weights, Math.max(3, Math.min(14, Math.round(480 / weights.cols))), dark, label),
      table(["expert", "rank", "load", "share"], layer.load.map((count: number, e: number) => [
        String(e), String(layer.ranks[e]), String(count), `${((100 * count) / Math.max(1, layer.choices)).toFixed(1)}%`,
      ])),
    );
  }
  return whole;
}

export function cacheBoard(board: any, dark: boolean): HTMLElement {
  const side = Math.max(6, Math.min(18, Math.round(900 / Math.sqrt(board.pages) / 8)));
  const columns = Math.max(8, Math.min(64, Math.ceil(Math.sqrt(board.pages * 2))));
  const canvas = h("canvas", {
    width: columns * side, height: Math.ceil(board.pages / columns) * side, role: "img",
    "aria-label": `${board.used} of ${board.pages} pages in use`,
  });
  const context = canvas.getContext("2d")!;
  const paint = (page: number, style: string) => {
    context.fillStyle = style;
    context.fillRect((page % columns) * side, Math.floor(page / columns) * side, side - 1, side - 1);
  };
  for (let page = 0; page < board.pages; page++) paint(page, dark ? "#232b36" : "#e4e8ee");
  for (const page of board.cached) paint(page, dark ? "#4a5566" : "#aeb8c4");
  board.requests.forEach((request: any, at: number) => {
    for (const page of request.pages) paint(page, `hsl(${(210 + at * 137.5) % 360} 70% ${dark ? 62 : 42}%)`);
  });
  return h("div", {},
    h("p", { className: "quiet" }, `${board.used} of ${board.pages} pages of ${board.page_tokens} tokens are in use; grey ones are kept for shared prefixes.`),
    canvas,
    table(["request", "tokens", "pages", "page table"], board.requests.map((request: any) => [
      String(request.id), String(request.tokens), String(request.pages.length),
      request.pages.slice(0, 24).join(" ") + (request.pages.length > 24 ? " …" : ""),
    ])),
    h("p", { className: "quiet" }, board.merge));
}
