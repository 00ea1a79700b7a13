/** The page: state in, drawing out, and the controls around it. */

import { narrate } from "./animation";
import { cacheBoard, headsBoard, routingBoard } from "./boards";
import { describeScene, shown } from "./describe";
import { EXAMPLES, TOUR } from "./examples";
import { ExpressionError, parse, products, type Tree } from "./expression";
import { Panel } from "./panel";
import * as remote from "./remote";
import { checked, compact, decode, DEFAULT, encode, type State } from "./state";
import { evaluate, shapes, type LeafSpec, type Matrix, type TensorRef } from "./values";
import { View, type Picked } from "./view";

const $ = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const BOARDS = ["heads", "routing", "cache"];

export class App {
  state: State = DEFAULT;
  trees: readonly Tree[] = [];
  info: remote.ModelInfo | null = null;
  pieces: readonly string[] = [];
  private readonly view: View;
  private readonly panel: Panel;
  private cursor = 0;
  private pinned: Picked | null = null;
  private lastStep = 0;
  private cameraTimer = 0;
  private loads = 0;
  /** The hash that this page wrote last, so that it does not read it back. */
  private written = "";

  constructor() {
    this.view = new View($("canvas"));
    this.panel = new Panel(this, $("panel"), $("player"), $("tour"));
    this.view.onCamera = () => {
      window.clearTimeout(this.cameraTimer);
      this.cameraTimer = window.setTimeout(() => this.keepCamera(), 150);
    };
    window.addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== this.written) void this.open(location.hash.slice(1));
    });
    prefersDark.addEventListener("change", () => void this.show());
    calm.addEventListener("change", () => calm.matches && this.play(false));
    $("skip").addEventListener("click", (event) => {
      event.preventDefault();
      $("canvas").focus();
    });
    this.listen($("canvas"));
    const loop = (now: number) => {
      this.tick(now);
      this.view.draw();
      requestAnimationFrame(loop);
    };
    requestAnimationFrame(loop);
  }

  get dark(): boolean {
    return this.state.theme === "auto" ? prefersDark.matches : this.state.theme === "dark";
  }

  async start(): Promise<void> {
    await this.open(location.hash.slice(1));
    try {
      this.info = await remote.modelInfo();
    } catch (error) {
      this.panel.askKey(String((error as Error).message));
    }
    this.panel.update();
  }

  async unlock(key: string): Promise<void> {
    remote.setKey(key);
    try {
      this.info = await remote.modelInfo();
      this.panel.update();
    } catch (error) {
      this.panel.askKey(String((error as Error).message));
    }
  }

  /** Opens a link; a bad one shows its error and the page as it was. */
  async open(hash: string): Promise<void> {
    try {
      const state = hash ? await decode(hash) : TOUR[0]!.state;
      this.written = hash;
      await this.set(calm.matches ? { ...state, playing: false } : state, false);
    } catch (error) {
      this.fail(error);
    }
  }

  /** Makes a change of the state visible. */
  async change(part: Partial<State>): Promise<void> {
    await this.set(checked({ ...this.current(), ...part }));
  }

  async set(state: State, write = true): Promise<void> {
    this.state = state;
    this.cursor = state.cursor;
    this.pinned = null;
    await this.show();
    if (write) await this.write();
  }

  /** The state with the view as it is now. */
  current(): State {
    return { ...this.state, cursor: this.cursor };
  }

  /** The state as a link keeps it: a scene that comes from the server is not in it. */
  linked(): State {
    const state = this.current();
    if (state.model.page === "") return state;
    const { expr, leaves, nodes, letters, title, note } = DEFAULT;
    return { ...state, expr, leaves, nodes, letters, title, note };
  }

  private async write(): Promise<void> {
    this.written = await encode(this.linked());
    history.replaceState(null, "", `#${this.written}`);
    this.panel.update();
  }

  private keepCamera(): void {
    if ($("canvas").hidden) return;
    this.state = { ...this.state, camera: this.view.getCamera() };
    void this.write();
  }

  fail(error: unknown): void {
    const message = error instanceof Error ? error.message : String(error);
    let pointer = "";
    if (error instanceof ExpressionError) {
      const from = Math.max(0, error.position - 40);
      const line = this.state.expr.slice(from, error.position + 40).replaceAll(/\s/g, " ");
      pointer = `\nat character ${error.position}: ${line}`;
    }
    const box = $("error");
    box.textContent = message.slice(0, 500) + pointer;
    box.hidden = false;
    this.ready();
  }

  private ready(): void {
    document.documentElement.dataset["ready"] = String(this.loads);
  }

  private async show(): Promise<void> {
    const load = ++this.loads;
    delete document.documentElement.dataset["ready"];
    document.documentElement.dataset["theme"] = this.dark ? "dark" : "light";
    $("error").hidden = true;
    $("value").hidden = true;
    try {
      const { model } = this.state;
      let board: any = null;
      if (model.page !== "") {
        let run = "";
        if (model.page !== "cache") {
          const recording = await remote.record(model.text);
          run = recording.run;
          this.pieces = recording.pieces;
        }
        const found = await remote.scene(model.page, run, model.layer, model.head, model.rank);
        if (load !== this.loads) return;
        if (BOARDS.includes(model.page)) {
          board = found;
          this.state = { ...this.state, title: found.title, note: found.note };
        } else this.state = checked({ ...this.state, ...found });
      } else this.pieces = [];
      $("board").hidden = !board;
      $("canvas").hidden = Boolean(board);
      if (board) {
        const shownBoard =
          model.page === "heads"
            ? await headsBoard(board, this.dark, (layer, head) => encode({ ...this.linked(), model: { ...model, page: "head", layer, head } }))
            : model.page === "routing" ? await routingBoard(board, this.dark) : cacheBoard(board, this.dark);
        if (load !== this.loads) return;
        this.trees = [];
        $("board").replaceChildren(shownBoard);
      } else {
        const trees = parse(this.state.expr);
        shapes(trees, this.state.leaves);
        const faces = await this.faces(trees);
        if (load !== this.loads) return;
        this.trees = trees;
        this.view.show(trees, this.state, faces, this.dark);
        this.setCursor(this.state.cursor);
        this.view.draw(true);
      }
      const words = board ? `${this.state.title}. ${this.state.note}` : describeScene(this.trees, shapes(this.trees, this.state.leaves), this.state);
      $("title").textContent = this.state.title || "Inside the matrix";
      $("note").textContent = this.state.note;
      this.panel.update();
      $("description").textContent = words;
      $("canvas").setAttribute("aria-label", this.state.title || "Product of matrices");
      this.ready();
    } catch (error) {
      if (load === this.loads) this.fail(error);
    }
  }

  private async faces(trees: readonly Tree[]): Promise<Map<string, Matrix>> {
    const { leaves, nodes } = this.state;
    const name = (ref: TensorRef) => `${ref.run} ${ref.layer} ${ref.head} ${ref.name}`;
    const refs = new Map(Object.values(leaves).flatMap((leaf) => (leaf.tensor ? [[name(leaf.tensor), leaf.tensor] as const] : [])));
    const found = new Map(await Promise.all([...refs].map(async ([key, ref]) => [key, await remote.tensor(ref)] as const)));
    return evaluate(trees, leaves, nodes, (ref: TensorRef, spec: LeafSpec) => {
      const matrix = found.get(name(ref))!;
      if (matrix.rows !== spec.rows || matrix.cols !== spec.cols) throw new Error(`the server's '${ref.name}' has another size`);
      return matrix;
    });
  }

  // -- animation -------------------------------------------------------------------------------------------------

  get total(): number {
    return this.view.plan.total;
  }

  setCursor(cursor: number): void {
    this.cursor = Math.max(0, Math.min(this.total, Math.round(cursor)));
    this.view.setCursor(this.cursor);
    this.panel.progress(this.cursor, this.total, this.state.playing, narrate(this.view.plan, this.cursor));
  }

  step(by: number): void {
    this.play(false);
    this.setCursor(this.cursor + by);
    void this.write();
  }

  play(playing = !this.state.playing): void {
    if (playing && this.total === 0) return;
    if (playing && this.cursor >= this.total) this.cursor = 0;
    this.state = { ...this.state, playing };
    this.lastStep = performance.now();
    this.setCursor(this.cursor);
    if (!playing) void this.write();
  }

  private tick(now: number): void {
    if (!this.state.playing || this.total === 0 || $("canvas").hidden) {
      this.lastStep = now;
      return;
    }
    const steps = Math.floor(((now - this.lastStep) / 1000) * this.state.speed);
    if (steps < 1) return;
    this.lastStep += (steps * 1000) / this.state.speed;
    // After the end the whole result stays for two seconds, then the sweep starts again.
    const rest = Math.ceil(2 * this.state.speed);
    if (this.resting > 0) {
      this.resting -= steps;
      if (this.resting <= 0) this.setCursor(0);
    } else {
      this.setCursor(this.cursor + steps);
      if (this.cursor >= this.total) this.resting = rest;
    }
  }
  private resting = 0;

  // -- pointer and keyboard --------------------------------------------------------------------------------------

  inspect(picked: Picked | null, pin = false): void {
    if (pin) this.pinned = picked;
    const box = $("value");
    this.view.mark(picked, this.dark);
    box.hidden = !picked;
    if (!picked) return;
    const node = this.trees.flatMap(products).find((each) => each.key === picked.key);
    const token = this.state.leaves["input"] && this.pieces[picked.i] !== undefined ? `  “${this.pieces[picked.i]}”` : "";
    box.textContent = `${node ? shown(node) : picked.key} [${picked.i}, ${picked.j}] = ${Number(picked.value.toPrecision(6))}${token}`;
    const [x, y] = this.view.project(picked.key, picked.i, picked.j);
    const stage = $("stage");
    box.style.left = `${Math.max(4, Math.min(stage.clientWidth - box.clientWidth - 4, x + 14))}px`;
    box.style.top = `${Math.max(4, Math.min(stage.clientHeight - 30, y - 34))}px`;
  }

  valueAt(key: string, i: number, j: number): Picked | null {
    const face = this.view.faces.get(key);
    if (!face || !(i >= 0 && i < face.rows && j >= 0 && j < face.cols)) return null;
    return { key, i, j, value: face.data[i * face.cols + j]! };
  }

  private listen(canvas: HTMLCanvasElement): void {
    let down: { x: number; y: number; timer: number } | null = null;
    const at = (event: PointerEvent): [number, number] => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const release = () => {
      if (down) window.clearTimeout(down.timer);
      down = null;
    };
    canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = at(event);
      release();
      if (event.ctrlKey) this.inspect(this.view.pick(x, y), true);
      else down = { x, y, timer: window.setTimeout(() => this.inspect(this.view.pick(x, y), true), 450) };
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (down && Math.hypot(x - down.x, y - down.y) > 6) release();
      if (event.pointerType === "mouse" && event.buttons === 0 && !this.pinned) this.inspect(this.view.pick(x, y));
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y] = at(event);
      if (down && this.pinned) this.inspect(null, true);
      else if (down && event.pointerType !== "mouse") this.inspect(this.view.pick(x, y), true);
      release();
    });
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => {
      release();
      if (!this.pinned) this.inspect(null);
    });
    const keys: Record<string, () => void> = {
      ArrowLeft: () => this.view.move(-0.1, 0, 1), ArrowRight: () => this.view.move(0.1, 0, 1),
      ArrowUp: () => this.view.move(0, 0.1, 1), ArrowDown: () => this.view.move(0, -0.1, 1),
      "+": () => this.view.move(0, 0, 1 / 1.15), "=": () => this.view.move(0, 0, 1 / 1.15), "-": () => this.view.move(0, 0, 1.15),
      a: () => this.view.move(0, 0, 1, -0.1), d: () => this.view.move(0, 0, 1, 0.1), w: () => this.view.move(0, 0, 1, 0, 0.1),
      s: () => this.view.move(0, 0, 1, 0, -0.1),
      " ": () => this.play(), ",": () => this.step(-1), ".": () => this.step(1),
      "0": () => { this.view.setCamera(DEFAULT.camera); this.keepCamera(); },
      g: () => void this.change({ guides: !this.state.guides }), l: () => void this.change({ legends: !this.state.legends }),
      Escape: () => this.inspect(null, true),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]!();
    });
  }

  /** What tests and notebooks may ask. */
  readonly inspector = {
    faces: (): Record<string, { rows: number; cols: number; data: number[] }> =>
      Object.fromEntries([...this.view.faces].map(([key, { rows, cols, data }]) => [key, { rows, cols, data: [...data] }])),
    state: (): State => this.current(),
    compact: () => compact(this.linked()),
    camera: () => this.view.getCamera(),
    project: (key: string, i: number, j: number) => this.view.project(key, i, j),
    frames: (count: number): number[] => {
      const times: number[] = [];
      for (let at = 0; at < count; at++) {
        this.view.move(0.01, 0, 1);
        this.view.draw(true);
        times.push(this.view.frameTimes.at(-1)!);
      }
      return times;
    },
    total: () => this.total,
    cursor: () => this.cursor,
    /** Opens a link without a new page; resolves when it is drawn. */
    open: (link: string): Promise<void> => {
      history.replaceState(null, "", `#${link}`);
      return this.open(link);
    },
    encode, decode, examples: EXAMPLES, tour: TOUR, checked,
  };
}

const app = new App();
(window as unknown as { colonnade: unknown }).colonnade = app.inspector;
void app.start();
