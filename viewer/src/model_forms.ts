/** Controls of a served model: its pages, and its admin key. */

import { h } from "./boards";
import { TOUR } from "./examples";
import type { App } from "./main";
import type { ModelInfo } from "./remote";
import type { Change } from "./scene_forms";
import { DEFAULT, type Page } from "./state";

const PAGE_NAMES: Record<Page, string> = {
  "": "No model", head: "An attention head", heads: "All heads", layer: "A whole layer", experts: "Experts",
  decode: "One-row decode", lora: "LoRA factors", routing: "Routing", cache: "Cache pages",
};
/** What a page asks for. */
const FIELDS: Record<Page, readonly string[]> = {
  "": [], head: ["text", "layer", "head"], heads: ["text"], layer: ["text", "layer"], experts: ["text", "layer", "head"],
  decode: ["text", "layer", "head"], lora: ["text", "layer", "head", "rank"], routing: ["text"], cache: ["refresh"],
};

/** Asks for the admin key; `refused` says why the last one did not do. */
export function keyForm(app: App, refused: string): { form: HTMLFormElement; input: HTMLInputElement } {
  const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Admin key" });
  const said = refused ? h("p", { className: "refused", role: "alert" }, refused)
    : h("p", { className: "quiet" }, "The admin key opens the pages of the served model and its cache.");
  const form = h("form", {}, said, h("label", {}, "Admin key", input), h("button", { className: "main" }, "Unlock"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    void app.unlock(input.value);
  });
  return { form, input };
}

/** Which page of the model is shown, and what for. */
export function modelForm(app: App, info: ModelInfo, change: Change): Node[] {
  const { state } = app;
  const page = h("select", { id: "model-page" }, ...["" as Page, ...info.pages].map((each) => h("option", { value: each, selected: each === state.model.page }, PAGE_NAMES[each])));
  const text = h("textarea", { id: "model-text", value: state.model.text || info.text });
  const used = FIELDS[state.model.page];
  const number = (id: "layer" | "head" | "rank", label: string, low: number, high: number) => {
    const input = h("input", { type: "number", id: `model-${id}`, min: String(low), max: String(high), value: String(state.model[id]) });
    return [input, h("label", { hidden: !used.includes(id) || (id === "rank" && info.adapter) }, label, input)] as const;
  };
  const expert = state.model.page === "experts";
  const [layer, layerLabel] = number("layer", `Layer, 0 to ${info.layers - 1}`, 0, info.layers - 1);
  const last = (expert ? info.experts : info.heads) - 1;
  const [head, headLabel] = number("head", `${expert ? "Expert" : "Head"}, 0 to ${last}`, 0, last);
  const [rank, rankLabel] = number("rank", "Rank of the factors", 1, 1024);
  const form = h("form", {}, h("p", { className: "quiet" }, `${info.model}: ${info.layers} layers, ${info.heads} heads${info.experts ? `, ${info.experts} experts` : ""}${info.plan ? `, ${info.plan}` : ""}`),
    h("label", {}, "Page", page), h("label", { className: "wide", hidden: !used.includes("text") }, "Text that the model reads", text),
    layerLabel, headLabel, rankLabel, h("button", { className: "main", hidden: used.length === 0 }, state.model.page === "cache" ? "Read the cache again" : "Show"));
  const show = () => {
    const chosen = page.value as Page;
    // Head 7 is no expert where there are four: another kind of number starts at 0.
    const same = (chosen === "experts") === expert;
    const model = { page: chosen, text: text.value, layer: Number(layer.value), head: same ? Number(head.value) : 0, rank: Number(rank.value) };
    change({ ...DEFAULT, theme: app.state.theme, plan: app.state.plan, model, ...(chosen === "" ? TOUR[0]!.state : {}) });
  };
  page.addEventListener("change", show);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show();
  });
  return [form];
}
