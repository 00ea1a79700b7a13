/** The page: state in, drawing out, and the controls around it. */

import { narrate } from "./animation";
import { cacheBoard, headsBoard, type Shown } from "./boards";
import { caption, describeScene, type Tokens } from "./describe";
import { EXAMPLES, TOUR } from "./examples";
import { ExpressionError, parse, type Tree } from "./expression";
import { Panel } from "./panel";
import * as remote from "./remote";
import { routingBoard } from "./routing";
import { checked, compact, decode, DEFAULT, encode, WHOLE, type State } from "./state";
import { listen } from "./input";
import { Inspector } from "./inspector";
import type { Picked } from "./picking";
import { evaluate, shapes, type LeafSpec, type Matrix, type TensorRef } from "./values";
import { View } from "./view";

const $ = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const BOARDS = ["heads", "routing", "cache"];

export class App {
  state: State = DEFAULT;
  trees: readonly Tree[] = [];
  info: remote.ModelInfo | null = null;
  private readonly view: View;
  private readonly panel: Panel;
  private readonly inspector: Inspector;
  private cursor = 0;
  /** The product that the page is near at first; "" for the whole scene. */
  private start = "";
  private lastStep = 0;
  private cameraTimer = 0;
  private loads = 0;
  /** The hash that this page wrote last, so that it does not read it back. */
  private written = "";

  constructor() {
    this.view = new View($("canvas"));
    this.inspector = new Inspector(this.view, $("stage"), $("value"));
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
    listen(this, this.view, $("canvas"));
    const resized = new ResizeObserver(() => this.refit());
    for (const id of ["stage", "caption", "tour", "player"]) resized.observe($(id));
    this.view.onChange = () => this.wake();
  }

  /** Draws at the next frame, and goes on while something moves; a still page does nothing. */
  private wake(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      this.tick(now);
      if (this.view.draw()) this.inspector.place();
      if ((this.state.playing && this.total > 0) || this.view.settling) this.wake();
    });
  }
  private frame = 0;

  get pinned(): Picked | null {
    return this.inspector.pinned;
  }

  get dark(): boolean {
    return this.state.theme === "auto" ? prefersDark.matches : this.state.theme === "dark";
  }

  async begin(): Promise<void> {
    await this.open(location.hash.slice(1));
    try {
      this.info = await remote.modelInfo();
    } catch {
      this.panel.askKey("");
    }
    this.panel.update();
  }

  /** Tries an admin key: shows the model, or says why not. */
  async unlock(key: string): Promise<void> {
    remote.setKey(key);
    try {
      this.info = await remote.modelInfo();
      if (!this.info) this.panel.askKey("The server did not answer. Try again.");
      else if (this.state.model.page !== "") await this.show();
    } catch {
      this.panel.askKey("This is not the server's admin key. Try again.");
    }
    this.panel.update();
  }

  /** Opens a link; a bad one shows its error and the page as it was. */
  async open(hash: string): Promise<void> {
    try {
      this.written = hash;
      const state = hash ? await decode(hash) : TOUR[0]!.state;
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
    window.clearTimeout(this.cameraTimer);
    this.state = state;
    this.cursor = state.cursor;
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
    this.nameFocus();
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

  private busyTimer = 0;
  private ready(): void {
    window.clearTimeout(this.busyTimer);
    $("busy").hidden = true;
    document.documentElement.dataset["ready"] = String(this.loads);
  }

  private async show(): Promise<void> {
    const load = ++this.loads;
    // A pass through a large model takes a while: say so, but not for what is quick.
    window.clearTimeout(this.busyTimer);
    this.busyTimer = window.setTimeout(() => ($("busy").hidden = false), 300);
    delete document.documentElement.dataset["ready"];
    document.documentElement.dataset["theme"] = this.dark ? "dark" : "light";
    $("error").hidden = true;
    this.inspector.clear();
    try {
      const { model } = this.state;
      let board: any = null;
      let found: Shown | null = null;
      let pieces: readonly string[] = [];
      let [start, positions] = ["", {} as Tokens["positions"]];
      if (model.page !== "") {
        let run = "";
        if (model.page !== "cache") {
          const recording = await remote.record(model.text);
          run = recording.run;
          pieces = recording.pieces;
        }
        const scene = await remote.scene(model.page, run, model.layer, model.head, model.rank);
        if (load !== this.loads) return;
        if (BOARDS.includes(model.page)) {
          board = scene;
          this.state = { ...this.state, title: scene.title, note: scene.note };
        } else {
          const { start: near = "", positions: some = {}, ...rest } = scene;
          [start, positions] = [near, some];
          this.state = checked({ ...this.state, ...rest });
        }
      }
      this.start = start;
      $("board").hidden = !board;
      $("canvas").hidden = Boolean(board);
      if (board) {
        const headLink = (layer: number, head: number) => encode({ ...this.linked(), model: { ...model, page: "head", layer, head } });
        found = model.page === "heads" ? await headsBoard(board, this.dark, headLink)
          : model.page === "routing" ? await routingBoard(board, this.dark, this.state.plan.ep ?? 1) : cacheBoard(board, this.dark);
        if (load !== this.loads) return;
        this.trees = [];
        $("board").replaceChildren(found.element);
      } else {
        const trees = parse(this.state.expr);
        shapes(trees, this.state.leaves);
        const faces = await this.faces(trees);
        if (load !== this.loads) return;
        this.trees = trees;
        this.inspector.trees = trees;
        this.inspector.tokens = { pieces, letters: this.state.letters, positions };
        this.view.show(trees, this.state, faces, this.dark, start);
        this.setCursor(this.state.cursor);
      }
      const words = found ? `${this.state.title}. ${this.state.note} ${found.words}` : describeScene(this.trees, shapes(this.trees, this.state.leaves), this.state);
      $("title").textContent = this.state.title || "Inside the matrix";
      $("note").textContent = this.state.note;
      this.nameFocus();
      this.panel.update();
      $("description").textContent = words;
      $("canvas").setAttribute("aria-label", this.state.title || "Product of matrices");
      if (!board) {
        this.refit();
        this.view.draw(true);
      }
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
    this.wake();
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

  // -- looking closer --------------------------------------------------------------------------------------------

  /** Shows the whole scene again. */
  showAll(): void {
    this.look(this.start ? WHOLE : "", DEFAULT.camera);
  }

  /** Brings a matrix near. */
  goTo(key: string, frame = 0): void {
    this.look(key, [...this.view.facing(key, frame), 0, 0, 0, 0]);
  }

  private look(focus: string, camera: readonly number[]): void {
    window.clearTimeout(this.cameraTimer);
    this.state = { ...this.state, focus, camera };
    this.nameFocus();
    this.fitted = "";
    this.refit();
    void this.write();
  }

  /** Brings the matrix of the kept number near, or else the next one of the scene. */
  focusNext(): void {
    const keys = [...this.view.faces.keys()].filter((key) => this.view.shows(key));
    if (!keys.length) return;
    this.goTo(this.pinned?.key ?? keys[(keys.indexOf(this.state.focus || this.start) + 1) % keys.length]!);
  }

  /** Says which matrix is near, while the camera stays there. */
  private nameFocus(): void {
    const { focus, camera, leaves } = this.state;
    const key = focus === "" ? this.start : focus;
    const near = camera[2] === 0 && this.view.shows(key) && !$("canvas").hidden;
    $("near").hidden = !near;
    if (!near) return;
    const how = focus === "" ? " (keys: 0 shows all, F the next matrix)" : "";
    $("near").textContent = caption(this.trees, shapes(this.trees, leaves), this.state, key) + how;
  }

  /** Fits the scene between the title and what lies at the bottom. */
  private refit(): void {
    const captionBottom = $("caption").offsetTop + $("caption").offsetHeight + 6;
    for (const id of ["board", "error"]) $(id).style.top = `${captionBottom}px`;
    const shown = (id: string) => !$(id).hidden && $(id).offsetHeight > 0;
    const bottoms = ["tour", "player"].filter(shown).map((id) => $("stage").clientHeight - $(id).offsetTop);
    const insets = { top: captionBottom, bottom: Math.max(0, ...bottoms) };
    const place = JSON.stringify([insets, $("stage").clientWidth, $("stage").clientHeight, this.state.camera, this.loads]);
    if (place === this.fitted) return;
    this.fitted = place;
    this.view.insets = insets;
    if (this.state.camera[2] === 0) this.view.setFocus(this.state.focus, this.state.camera);
  }
  private fitted = "";

  inspect(picked: Picked | null, pin = false): void {
    this.inspector.show(picked, pin, this.dark);
  }

  /** Keeps an element and brings it near; null if the matrix has no such element. */
  lookUp(key: string, i: number, j: number): Picked | null {
    const picked = this.inspector.valueAt(key, i, j);
    if (picked) this.view.approach(picked);
    this.inspect(picked, true);
    return picked;
  }

  /** What tests and notebooks may ask. */
  readonly asked = {
    /** Faces by key: base64 of their float32 values. */
    faces: (): Record<string, { rows: number; cols: number; data: string }> =>
      Object.fromEntries([...this.view.faces].map(([key, { rows, cols, data }]) => {
        let binary = "";
        for (const byte of new Uint8Array(data.buffer, data.byteOffset, data.byteLength)) binary += String.fromCharCode(byte);
        return [key, { rows, cols, data: btoa(binary) }];
      })),
    value: (key: string, i: number, j: number) => this.inspector.valueAt(key, i, j)?.value,
    state: (): State => this.current(),
    compact: () => compact(this.linked()),
    camera: () => this.view.getCamera(),
    project: (key: string, i: number, j: number) => this.view.project(key, i, j),
    /** Milliseconds of frames: turned, on this thread; or at rest with all points, until the last pixel is drawn. */
    frames: (count: number, rest = false): number[] =>
      Array.from({ length: count }, () => {
        const start = performance.now();
        if (!rest) this.view.move(0.01, 0, 1);
        this.view.draw(true);
        if (rest) this.view.finish();
        return performance.now() - start;
      }),
    total: () => this.total,
    labels: () => this.view.labels.taken,
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
(window as unknown as { colonnade: unknown }).colonnade = app.asked;
void app.begin();
