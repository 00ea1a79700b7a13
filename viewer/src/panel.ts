/** The panel beside the drawing: groups of controls, the player's bar, and the tour. */

import { KINDS } from "./animation";
import { h } from "./boards";
import { EXAMPLES, TOUR } from "./examples";
import { format } from "./expression";
import { SCHEMES } from "./geometry";
import type { App } from "./main";
import { keyForm, modelForm } from "./model_forms";
import { expressionForm, goToButtons, inspectForm, matrixFields, productFields, type Change } from "./scene_forms";
import { COLOURS, encode, SENSITIVITIES, THEMES, type State } from "./state";

const AXES = { tp: "tensor", cp: "context", dp: "data", ep: "expert" } as const;
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
    this.playButton.addEventListener("click", () => app.player.play());
    this.slider.addEventListener("input", () => {
      app.player.play(false);
      app.player.setCursor(Number(this.slider.value));
    });
    const button = (label: string, text: string, act: () => void) => {
      const made = h("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", act);
      return made;
    };
    player.append(button("Back one step", "‹", () => app.player.step(-1)), this.playButton, button("Forward one step", "›", () => app.player.step(1)), this.slider, this.said);
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
    const { form, input } = keyForm(this.app, refused);
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
      this.fill("expression", state.expr, () => expressionForm(this.app, this.change));
      this.fill("matrices", [names, state.leaves], () => matrixFields(this.app, this.change));
      this.fill("products", [names, state.nodes], () => productFields(this.app, this.change));
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
    this.fill("inspect", this.app.trees.map((tree) => format(tree)), () => inspectForm(this.app));
    this.fill("goto", [this.app.trees.map((tree) => format(tree)), state.focus, state.camera[2] === 0], () => goToButtons(this.app));
    this.slots.get("animation")!.parentElement!.hidden = board;
    this.slots.get("plan")!.parentElement!.hidden = board && !routing;
    this.slots.get("inspect")!.parentElement!.hidden = board;
    this.slots.get("goto")!.parentElement!.hidden = board;
    if (board) this.player.hidden = true;
    const group = this.slots.get("model")!;
    group.parentElement!.hidden = !this.app.info && !group.querySelector("form");
    const { info } = this.app;
    if (info) this.fill("model", [state.model, info], () => modelForm(this.app, info, this.change));
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

  private readonly change: Change = (part) => {
    this.app.change({ tour: 0, ...part }).catch((error: unknown) => this.app.fail(error));
  };

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
