/** The routing page: tokens × experts, load, drops and entropy, over the text and over the steps of training. */

import { h, picture, table, type Shown } from "./boards";
import { blockOf } from "./partition";
import { tensor } from "./remote";
import type { Matrix } from "./values";

/** The load of the experts at successive times. */
interface Times {
  readonly load: readonly (readonly number[])[];
  readonly dropped: readonly number[];
  readonly entropy: readonly number[];
}
const WIDTH = 320;
const LINE_HEIGHT = 44;

const sum = (x: readonly number[]): number => x.reduce((all, each) => all + each, 0);
const percent = (part: number, whole: number): string => `${((100 * part) / Math.max(Number.EPSILON, whole)).toFixed(1)}%`;

/** A line through values from 0 to `top`, under its caption. */
function line(values: readonly number[], top: number, label: string): HTMLElement {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${LINE_HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const path = document.createElementNS(space, "polyline");
  const step = WIDTH / values.length;
  const points = values.flatMap((value, at) => {
    const y = LINE_HEIGHT - 2 - (LINE_HEIGHT - 4) * Math.min(1, value / (top || 1));
    return [`${at * step},${y}`, `${(at + 1) * step},${y}`];
  });
  path.setAttribute("points", points.join(" "));
  svg.append(path);
  return h("figure", {}, h("figcaption", {}, label), svg);
}

/** Load of each expert (down) by time (across), with entropy and drops below. */
function overTime(times: Times, experts: number, dark: boolean, title: string): HTMLElement {
  const count = times.load.length;
  const data = new Float32Array(experts * count);
  times.load.forEach((load, at) => load.forEach((n, e) => (data[e * count + at] = n / Math.max(1, sum(load)))));
  const shares: Matrix = { rows: experts, cols: count, data };
  const dropped = times.dropped.map((n, at) => n / Math.max(1, sum(times.load[at]!)));
  const most = Math.max(...dropped);
  const low = Math.min(...times.entropy).toFixed(2);
  const high = Math.max(...times.entropy).toFixed(2);
  return h("section", {}, h("h3", {}, title),
    h("figure", {}, h("figcaption", {}, "load of each expert (down)"),
      picture(shares, WIDTH / count, Math.max(2, Math.min(14, 240 / experts)), dark, `${title}: load by expert`)),
    line(times.entropy, Math.log(experts), `entropy ${low} to ${high} of ${Math.log(experts).toFixed(2)} nats`),
    line(dropped, most, most > 0 ? `dropped, at most ${percent(most, 1)} of the choices` : "nothing dropped"));
}

export async function routingBoard(board: any, dark: boolean, ep: number): Promise<Shown> {
  const whole = h("div", {}, h("p", { className: "quiet" },
    "Blue: the router's weight of a token and an expert. Orange: a choice that the expert's capacity drops. Load: the router's choices, before drops."));
  const words: string[] = [];
  const experts: number = board.experts;
  const ranks = Math.min(ep, experts);
  const rankOf = (e: number) => blockOf(e, experts, ranks);
  for (const layer of board.layers) {
    const weights = await tensor({ run: board.run, layer: layer.layer, head: -1, name: "routing" }, { parts: 1 });
    const label = `Tokens (down) and experts (across) of layer ${layer.layer}`;
    const choices = sum(layer.load);
    const busiest = layer.load.indexOf(Math.max(...layer.load));
    let said = `entropy of the load ${layer.entropy.toFixed(2)} of ${Math.log(experts).toFixed(2)} nats, ` +
      `${layer.dropped} of ${choices} choices dropped, expert ${busiest} is chosen most (${percent(layer.load[busiest], choices)})`;
    if (ranks > 1) {
      const byRank = Array.from({ length: ranks }, (_, rank) => sum(layer.load.filter((_: number, e: number) => rankOf(e) === rank)));
      said += `; load by rank: ${byRank.map((n, rank) => `${rank}: ${percent(n, choices)}`).join(", ")}`;
    }
    words.push(`Layer ${layer.layer}: ${said}.`);
    const windows: Times = {
      load: layer.windows.map((each: any) => each.load), dropped: layer.windows.map((each: any) => each.dropped),
      entropy: layer.windows.map((each: any) => each.entropy),
    };
    const parts = [
      h("section", {}, h("h3", {}, "Tokens (down) × experts (across)"),
        picture(weights, Math.max(3, Math.min(18, Math.round(320 / weights.cols))), Math.max(2, Math.min(8, 420 / weights.rows)), dark, label)),
      overTime(windows, experts, dark, layer.window_tokens === 1 ? "Over the text, token by token" : `Over the text, in windows of ${layer.window_tokens} tokens`),
    ];
    if (layer.history) {
      const { step } = layer.history;
      parts.push(overTime(layer.history, experts, dark, `Over training, steps ${step[0]} to ${step.at(-1)}`));
    }
    const rows = layer.load.map((count: number, e: number) => [
      String(e), String(rankOf(e)), String(count), percent(count, choices), String(layer.kept[e]),
    ]);
    whole.append(
      h("h2", {}, `Layer ${layer.layer}`), h("p", { className: "quiet" }, said), h("div", { className: "side-by-side" }, ...parts),
      h("details", {}, h("summary", {}, "Numbers by expert"), table(["expert", "rank", "chosen", "share", "kept"], rows)));
  }
  return { element: whole, words: words.join(" ") };
}
