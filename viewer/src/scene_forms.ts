/** Controls of the scene: its expression, matrices and products, and how to get to one of them. */

import { h } from "./boards";
import { digits, shown } from "./describe";
import { leaves, parse, products, type Tree } from "./expression";
import type { App } from "./main";
import { WHOLE, type State } from "./state";
import { EPILOGUES, INITS, type LeafSpec, type NodeSpec } from "./values";

/** Makes a change of the state that the user asked for. */
export type Change = (part: Partial<State>) => void;

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

/** Keys of all matrices of the scene, and their names. */
function matrixNames(app: App): [key: string, name: string][] {
  const trees = app.trees;
  const given = [...new Set(trees.flatMap(leaves).map((leaf) => leaf.name))];
  return [...given.map((name): [string, string] => [name, name]), ...trees.flatMap(products).map((node): [string, string] => [node.key, shown(node)])];
}

export function goToButtons(app: App): Node[] {
  const { state } = app;
  const button = (text: string, pressed: boolean, act: () => void) => {
    const made = h("button", { type: "button", id: `goto-${text}`, "aria-pressed": String(pressed) }, text);
    made.addEventListener("click", act);
    return made;
  };
  const near = state.camera[2] === 0 ? state.focus : null;
  return [
    button("Whole scene", near === WHOLE, () => app.showAll()),
    ...matrixNames(app).map(([key, name]) => button(name, near === key, () => app.goTo(key))),
  ];
}

export function expressionForm(app: App, change: Change): Node[] {
  const { state } = app;
  const area = h("textarea", { id: "expression", value: state.expr, spellcheck: false, "aria-label": "Expression" });
  const form = h("form", {}, area, h("button", { className: "main" }, "Draw"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      app.state = { ...app.state, expr: area.value };
      const sizes = fitted(parse(area.value), app.state.leaves);
      change({ expr: area.value, leaves: sizes, places: {}, title: "", note: "", cursor: 0 });
    } catch (error) {
      app.fail(error);
    }
  });
  return [form, h("p", { className: "quiet" }, "Names, @ for products, brackets, and name = for a result; a semicolon starts another expression.")];
}

/** Size and values of each matrix. */
export function matrixFields(app: App, change: Change): Node[] {
  const { state } = app;
  return [...new Set(app.trees.flatMap(leaves).map((leaf) => leaf.name))].slice(0, 32).flatMap((name) => {
    if (!state.leaves[name]) return [];
    const spec = state.leaves[name];
    const put = (part: Partial<LeafSpec>) => {
      // A side that others share changes with them.
      const others = Object.fromEntries(Object.entries(app.state.leaves).filter(([each]) => each !== name));
      const own = { ...app.state.leaves[name]!, ...part };
      const trees = app.trees;
      const sizes = "rows" in part || "cols" in part ? fitted(trees, { ...others, [name]: own }) : { ...app.state.leaves, [name]: own };
      change({ leaves: { ...app.state.leaves, ...sizes }, title: "", cursor: 0 });
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

/** Epilogue and blocks of each product. */
export function productFields(app: App, change: Change): Node[] {
  const { state } = app;
  return app.trees.flatMap(products).slice(0, 32).flatMap((node) => {
    const spec = Object.hasOwn(state.nodes, node.key) ? state.nodes[node.key]! : {};
    const name = shown(node);
    const put = (part: Partial<NodeSpec>) => change({ nodes: { ...app.state.nodes, [node.key]: { ...spec, ...part } } });
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

/** Shows one number, by its matrix, row and column. */
export function inspectForm(app: App): Node[] {
  const select = h("select", { id: "inspect-matrix" }, ...matrixNames(app).map(([key, name]) => h("option", { value: key }, name)));
  const row = h("input", { type: "number", id: "inspect-row", min: "0", value: "0" });
  const col = h("input", { type: "number", id: "inspect-col", min: "0", value: "0" });
  const out = h("output", { id: "inspect-value" });
  const form = h("form", {}, h("label", {}, "matrix", select), h("label", {}, "row", row), h("label", {}, "column", col), h("button", {}, "Show"), " ", out);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const picked = app.lookUp(select.value, Number(row.value), Number(col.value));
    out.textContent = picked ? digits(picked.value) : "outside of the matrix";
  });
  return [form];
}
