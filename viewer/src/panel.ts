/** The controls: examples, expression, matrices, products, animation, looks, plan, model, description. */

import { KINDS } from "./animation";
import { h } from "./boards";
import { digits, shown } from "./describe";
import { EXAMPLES, TOUR } from "./examples";
import { format, leaves, parse, products, type Tree } from "./expression";
import { SCHEMES } from "./geometry";
import type { App } from "./main";
import { COLOURS, DEFAULT, encode, SENSITIVITIES, THEMES, WHOLE, type Page, type State } from "./state";
import { EPILOGUES, INITS, type LeafSpec, type NodeSpec } from "./values";

const PAGE_NAMES: Record<Page, string> = {
  "": "No model", head: "An attention head", heads: "All heads", layer: "A whole layer", experts: "Experts",
  decode: "One-row decode", lora: "LoRA factors", routing: "Routing", cache: "Cache pages",
};
/** What a page asks for. */
const FIELDS: Record<Page, readonly string[]> = {
  "": [], head: ["text", "layer", "head"], heads: ["text"], layer: ["text", "layer"], experts: ["text", "layer", "head"],
  decode: ["text", "layer", "head"], lora: ["text", "layer", "head", "rank"], routing: ["text"], cache: ["refresh"],
};
const AXES = { tp: "tensor", cp: "context", dp: "data", ep: "expert" } as const;
const NEW_SIDE = 24;

/** Sizes for a program's leaves: those known, and for new ones whatever fits. */
export function fitted(trees: readonly Tree[], known: Readonly<Record<string, LeafSpec>>): Record<string, LeafSpec> {
  const parent = new Map<string, string>();
  const find = (side: string): string => {
    const up = parent.get(side) ?? side;
    return up === side ? side : find(up);
  };
  const visit = (tree: Tree): [string, string] => {
    if (tree.kind === "leaf") return [`${tree.name} rows`, `${tree.name} cols`];
    const [left, right] = [visit(tree.left), visit(tree.right)];
    parent.set(find(left[1]), find(right[0]));
    return [left[0], right[1]];
  };
  trees.forEach(visit);
  const names = [...new Set(trees.flatMap(leaves).map((leaf) => leaf.name))];
  const sizes = new Map<string, number>();
  for (const name of names)
    if (Object.hasOwn(known, name)) {
      sizes.set(find(`${name} rows`), known[name]!.rows);
      sizes.set(find(`${name} cols`), known[name]!.cols);
    }
  const size = (side: string) => sizes.get(find(side)) ?? NEW_SIDE;
  return Object.fromEntries(
    names.map((name) => [name, { ...(Object.hasOwn(known, name) ? known[name] : {}), rows: size(`${name} rows`), cols: size(`${name} cols`) }]),
  );
}

export class Panel {
  private readonly slots = new Map<string, HTMLElement>();
  private readonly shown = new Map<string, string>();
  private readonly playButton = h("button", { type: "button" });
  private readonly slider = h("input", { type: "range", min: "0", value: "0", "aria-label": "Step of the animation" });
  private readonly said = h("output", {});

  constructor(
    private readonly app: App,
    private readonly root: HTMLElement,
    private readonly player: HTMLElement,
    private readonly tour: HTMLElement,
  ) {
    const slot = (name: string, title: string, open = false) => {
      const body = h("div", {});
      this.slots.set(name, body);
      root.append(h("details", { open, id: `group-${name}` }, h("summary", {}, title), body));
    };
    slot("model", "Model", true);
    slot("examples", "Examples and tour", true);
    slot("goto", "Go to a matrix", true);
    slot("expression", "Expression");
    slot("matrices", "Matrices");
    slot("products", "Products");
    slot("animation", "Animation");
    slot("looks", "Looks");
    slot("plan", "Partition by a plan");
    slot("inspect", "Inspect a number");
    slot("words", "In words", true);
    this.slots.get("words")!.append(h("p", { id: "description" }), h("p", { className: "quiet" },
      "Keys in the drawing: arrows turn, + and - zoom, W A S D move, 0 shows all, F brings the next matrix near, Space plays, comma and full stop step, G guides, L legends. Double-click a matrix to bring it near; hold or Control-click a number to keep it."));
    this.playButton.addEventListener("click", () => app.play());
    this.slider.addEventListener("input", () => {
      app.play(false);
      app.setCursor(Number(this.slider.value));
    });
    const button = (label: string, text: string, act: () => void) => {
      const made = h("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", act);
      return made;
    };
    player.append(button("Back one step", "‹", () => app.step(-1)), this.playButton, button("Forward one step", "›", () => app.step(1)), this.slider, this.said);
    void this.links();
  }

  private async links(): Promise<void> {
    const body = this.slots.get("examples")!;
    const first = h("a", { href: `#${await encode(TOUR[0]!.state)}`, id: "start-tour" }, "Guided tour in eight steps");
    body.append(h("p", {}, first));
    let group = "";
    let list = h("ul", {});
    for (const example of EXAMPLES) {
      if (example.group !== group) {
        group = example.group;
        list = h("ul", {});
        body.append(h("details", {}, h("summary", {}, group), list));
      }
      list.append(h("li", {}, h("a", { href: `#${await encode(example.state)}` }, example.name)));
    }
  }

  /** Asks for the admin key; `refused` says why the last one did not do. */
  askKey(refused: string): void {
    const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Admin key" });
    const said = refused ? h("p", { className: "refused", role: "alert" }, refused)
      : h("p", { className: "quiet" }, "The admin key opens the pages of the served model and its cache.");
    const form = h("form", {}, said, h("label", {}, "Admin key", input), h("button", { className: "main" }, "Unlock"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.app.unlock(input.value);
    });
    this.shown.delete("model");
    this.slots.get("model")!.replaceChildren(form);
    if (refused) input.focus();
  }

  progress(cursor: number, total: number, playing: boolean, words: string): void {
    this.player.hidden = total === 0;
    this.slider.max = String(total);
    this.slider.value = String(cursor);
    this.playButton.textContent = playing ? "Pause" : "Play";
    this.said.textContent = words;
  }

  update(): void {
    const focused = document.activeElement instanceof HTMLElement && this.root.contains(document.activeElement) ? document.activeElement.id : "";
    const { state } = this.app;
    const own = state.model.page === "";
    // A model's page leads to its matrices first, the page without one to the tour.
    const [goto, examples] = (["goto", "examples"] as const).map((name) => this.slots.get(name)!.parentElement!);
    const [first, second] = own ? [examples!, goto!] : [goto!, examples!];
    if (first.nextElementSibling !== second) first.after(second);
    for (const name of ["expression", "matrices", "products"]) this.slots.get(name)!.parentElement!.hidden = !own;
    if (own) {
      const names = this.app.trees.map((tree) => format(tree));
      this.fill("expression", state.expr, () => this.expression(state));
      this.fill("matrices", [names, state.leaves], () => this.matrices(this.app.state));
      this.fill("products", [names, state.nodes], () => this.products(this.app.state));
    }
    const board = this.app.trees.length === 0;
    this.fill("animation", [state.anim, state.fuse, state.speed], () => [
      this.choice("anim", "Method", KINDS, state.anim), this.check("fuse", "Fuse chains", state.fuse),
      this.number("speed", "Steps a second", state.speed, 0.01, 10000, "any"),
    ]);
    const looks = [state.theme, state.scheme, state.sensitivity, state.colour, state.size, state.gap, state.scatter, state.guides, state.legends];
    this.fill("looks", [looks, board], () => board ? [this.choice("theme", "Theme", THEMES, state.theme)] : [
      this.choice("theme", "Theme", THEMES, state.theme), this.choice("scheme", "Layout", SCHEMES, state.scheme),
      this.choice("sensitivity", "Sensitivity", SENSITIVITIES, state.sensitivity), this.choice("colour", "Colour by", COLOURS, state.colour),
      this.number("size", "Point size", state.size, 0.1, 4, "0.1"), this.number("gap", "Gap", state.gap, 1, 64, "1"),
      this.number("scatter", "Scatter", state.scatter, 0, 256, "1"), this.check("guides", "Guides", state.guides),
      this.check("legends", "Legends", state.legends),
    ]);
    const routing = state.model.page === "routing";
    const named = Object.keys(state.letters).length > 0;
    this.fill("plan", [state.plan, named, routing], () => [
      h("p", { className: "quiet" }, routing ? "Experts are distributed over ep ranks: the page adds up the load of each." : named ? "Ranks of each mesh axis; colours show which rank has which block." : "This scene does not name its dimensions; open one of a model, or the Megatron example."),
      ...(["tp", "cp", "dp", "ep"] as const).filter((axis) => !routing || axis === "ep").map((axis) => {
        const input = h("input", { type: "number", id: `plan-${axis}`, min: "1", max: "64", value: String(state.plan[axis] ?? 1) });
        input.addEventListener("change", () => this.change({ plan: { ...this.app.state.plan, [axis]: Number(input.value) }, colour: "rank" }));
        return h("label", {}, `${axis} (${AXES[axis]} parallel)`, input);
      }),
    ]);
    this.fill("inspect", this.app.trees.map((tree) => format(tree)), () => this.inspect());
    this.fill("goto", [this.app.trees.map((tree) => format(tree)), state.focus, state.camera[2] === 0], () => this.goTo(state));
    this.slots.get("animation")!.parentElement!.hidden = board;
    this.slots.get("plan")!.parentElement!.hidden = board && !routing;
    this.slots.get("inspect")!.parentElement!.hidden = board;
    this.slots.get("goto")!.parentElement!.hidden = board;
    if (board) this.player.hidden = true;
    const group = this.slots.get("model")!;
    group.parentElement!.hidden = !this.app.info && !group.querySelector("form");
    if (this.app.info) this.fill("model", [state.model, this.app.info], () => this.model(state));
    this.showTour(state.tour);
    if (focused) document.getElementById(focused)?.focus();
  }

  /** Fills a group anew only if what it shows has changed: a field that someone types into must stay. */
  private fill(name: string, shows: unknown, children: () => (Node | string)[]): void {
    const key = JSON.stringify(shows);
    if (this.shown.get(name) === key) return;
    this.shown.set(name, key);
    this.slots.get(name)!.replaceChildren(...children());
  }

  private change(part: Partial<State>): void {
    this.app.change({ tour: 0, ...part }).catch((error: unknown) => this.app.fail(error));
  }

  /** Keys of all matrices of the scene, and their names. */
  private matrixNames(): [key: string, name: string][] {
    const trees = this.app.trees;
    const given = [...new Set(trees.flatMap(leaves).map((leaf) => leaf.name))];
    return [...given.map((name): [string, string] => [name, name]), ...trees.flatMap(products).map((node): [string, string] => [node.key, shown(node)])];
  }

  private goTo(state: State): Node[] {
    const button = (text: string, pressed: boolean, act: () => void) => {
      const made = h("button", { type: "button", id: `goto-${text}`, "aria-pressed": String(pressed) }, text);
      made.addEventListener("click", act);
      return made;
    };
    const near = state.camera[2] === 0 ? state.focus : null;
    return [
      button("Whole scene", near === WHOLE, () => this.app.showAll()),
      ...this.matrixNames().map(([key, name]) => button(name, near === key, () => this.app.goTo(key))),
    ];
  }

  private choice<K extends keyof State>(field: K, label: string, choices: readonly string[], value: string): HTMLElement {
    const select = h("select", { id: `set-${field}` }, ...choices.map((each) => h("option", { value: each, selected: each === value }, each)));
    select.addEventListener("change", () => this.change({ [field]: select.value, ...(field === "anim" ? { cursor: 0 } : {}) }));
    return h("label", {}, label, select);
  }

  private check(field: keyof State, label: string, value: boolean): HTMLElement {
    const input = h("input", { type: "checkbox", id: `set-${field}`, checked: value });
    input.addEventListener("change", () => this.change({ [field]: input.checked }));
    return h("label", {}, label, input);
  }

  private number(field: keyof State, label: string, value: number, min: number, max: number, step: string): HTMLElement {
    const input = h("input", { type: "number", id: `set-${field}`, min: String(min), max: String(max), step, value: String(value) });
    input.addEventListener("change", () => this.change({ [field]: Number(input.value) }));
    return h("label", {}, label, input);
  }

  private expression(state: State): Node[] {
    const area = h("textarea", { id: "expression", value: state.expr, spellcheck: false, "aria-label": "Expression" });
    const form = h("form", {}, area, h("button", { className: "main" }, "Draw"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      try {
        this.app.state = { ...this.app.state, expr: area.value };
        const sizes = fitted(parse(area.value), this.app.state.leaves);
        this.change({ expr: area.value, leaves: sizes, places: {}, title: "", note: "", cursor: 0 });
      } catch (error) {
        this.app.fail(error);
      }
    });
    return [form, h("p", { className: "quiet" }, "Names, @ for products, brackets, and name = for a result; a semicolon starts another expression.")];
  }

  private matrices(state: State): Node[] {
    return [...new Set(this.app.trees.flatMap(leaves).map((leaf) => leaf.name))].slice(0, 32).flatMap((name) => {
      if (!state.leaves[name]) return [];
      const spec = state.leaves[name];
      const put = (part: Partial<LeafSpec>) => {
        // A side that others share changes with them.
        const others = Object.fromEntries(Object.entries(this.app.state.leaves).filter(([each]) => each !== name));
        const own = { ...this.app.state.leaves[name]!, ...part };
        const trees = this.app.trees;
        const sizes = "rows" in part || "cols" in part ? fitted(trees, { ...others, [name]: own }) : { ...this.app.state.leaves, [name]: own };
        this.change({ leaves: { ...this.app.state.leaves, ...sizes }, title: "", cursor: 0 });
      };
      const size = (field: "rows" | "cols") => {
        const input = h("input", { type: "number", id: `leaf-${name}-${field}`, min: "1", max: "1024", value: String(spec[field]), "aria-label": `${field} of ${name}` });
        input.addEventListener("change", () => put({ [field]: Number(input.value) }));
        return input;
      };
      const init = h("select", { id: `leaf-${name}-init`, "aria-label": `values of ${name}` }, ...INITS.map((each) => h("option", { value: each, selected: each === (spec.init ?? "gaussian") }, each)));
      init.addEventListener("change", () => put({ init: init.value as LeafSpec["init"] }));
      return [h("h3", {}, name), h("label", {}, size("rows"), "×", size("cols")), h("label", {}, "values", init)];
    });
  }

  private products(state: State): Node[] {
    return this.app.trees.flatMap(products).slice(0, 32).flatMap((node) => {
      const spec = Object.hasOwn(state.nodes, node.key) ? state.nodes[node.key]! : {};
      const name = shown(node);
      const put = (part: Partial<NodeSpec>) => this.change({ nodes: { ...this.app.state.nodes, [node.key]: { ...spec, ...part } } });
      const epilogue = h("select", { id: `node-${node.key}-epilogue`, "aria-label": `epilogue of ${name}` }, ...EPILOGUES.map((each) => h("option", { value: each, selected: each === (spec.epilogue ?? "none") }, each)));
      epilogue.addEventListener("change", () => put({ epilogue: epilogue.value as NodeSpec["epilogue"] }));
      const count = (axis: "i" | "j" | "k") => {
        const input = h("input", { type: "number", id: `node-${node.key}-${axis}`, min: "1", max: "64", value: String(spec[axis] ?? 1), "aria-label": `blocks of ${name} along ${axis}` });
        input.addEventListener("change", () => put({ [axis]: Number(input.value) }));
        return h("label", {}, `blocks along ${axis}`, input);
      };
      return [h("h3", {}, name), h("label", {}, "epilogue", epilogue), count("i"), count("j"), count("k")];
    });
  }

  private inspect(): Node[] {
    const select = h("select", { id: "inspect-matrix" }, ...this.matrixNames().map(([key, name]) => h("option", { value: key }, name)));
    const row = h("input", { type: "number", id: "inspect-row", min: "0", value: "0" });
    const col = h("input", { type: "number", id: "inspect-col", min: "0", value: "0" });
    const out = h("output", { id: "inspect-value" });
    const form = h("form", {}, h("label", {}, "matrix", select), h("label", {}, "row", row), h("label", {}, "column", col), h("button", {}, "Show"), " ", out);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const picked = this.app.lookUp(select.value, Number(row.value), Number(col.value));
      out.textContent = picked ? digits(picked.value) : "outside of the matrix";
    });
    return [form];
  }

  private model(state: State): Node[] {
    const info = this.app.info!;
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
      this.change({ ...DEFAULT, theme: this.app.state.theme, plan: this.app.state.plan, model, ...(chosen === "" ? TOUR[0]!.state : {}) });
    };
    page.addEventListener("change", show);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      show();
    });
    return [form];
  }

  private showTour(at: number): void {
    this.tour.hidden = at === 0;
    if (!at) return;
    const step = TOUR[at - 1]!;
    const nav = h("nav", { "aria-label": "Steps of the tour" });
    const link = async (to: number, text: string) => {
      const target = TOUR[to - 1];
      return target ? h("a", { href: `#${await encode(target.state)}`, rel: to > at ? "next" : "prev" }, text) : h("span", {});
    };
    const close = h("button", { type: "button" }, "Close");
    close.addEventListener("click", () => this.change({ tour: 0 }));
    void Promise.all([link(at - 1, "‹ Back"), link(at + 1, "Next ›")]).then(([back, next]) => nav.append(back!, h("span", { className: "quiet" }, `${at} of ${TOUR.length}`), close, next!));
    this.tour.replaceChildren(h("strong", {}, step.title), h("p", {}, step.text), nav);
  }
}
