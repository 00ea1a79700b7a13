/** The page: state in, drawing out, and the controls around it. */

import type { Shown } from "./boards";
import { caption, describeScene } from "./describe";
import { TOUR } from "./examples";
import { ExpressionError, parse, type Tree } from "./expression";
import { hooks } from "./hooks";
import { drawBoard, evaluateFaces, fetchPage } from "./load";
import { Panel } from "./panel";
import { Player } from "./player";
import * as remote from "./remote";
import { checked, decode, DEFAULT, encode, WHOLE, type State } from "./state";
import { listen } from "./input";
import { Inspector } from "./inspector";
import type { Picked } from "./picking";
import { shapes } from "./values";
import { View } from "./view";

const $ = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

export class App {
  state: State = DEFAULT;
  trees: readonly Tree[] = [];
  info: remote.ModelInfo | null = null;
  readonly view: View;
  private readonly panel: Panel;
  readonly player: Player;
  readonly inspector: Inspector;
  /** The product that the page is near at first; "" for the whole scene. */
  private start = "";
  private cameraTimer = 0;
  private loads = 0;
  /** The hash that this page wrote last, so that it does not read it back. */
  private written = "";

  constructor() {
    this.view = new View($("canvas"));
    this.inspector = new Inspector(this.view, $("stage"), $("value"));
    this.panel = new Panel(this, $("panel"), $("player"), $("tour"));
    this.player = new Player(this, this.view, this.panel, $("canvas"));
    this.view.onCamera = () => {
      window.clearTimeout(this.cameraTimer);
      this.cameraTimer = window.setTimeout(() => this.keepCamera(), 150);
    };
    window.addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== this.written) void this.open(location.hash.slice(1));
    });
    prefersDark.addEventListener("change", () => void this.show());
    calm.addEventListener("change", () => calm.matches && this.player.play(false));
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
  wake(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      this.player.tick(now);
      if (this.view.draw()) this.inspector.place();
      if (this.player.moving || this.view.settling) this.wake();
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
    this.player.cursor = state.cursor;
    await this.show();
    if (write) await this.write();
  }

  /** The state with the view as it is now. */
  current(): State {
    return { ...this.state, cursor: this.player.cursor };
  }

  /** The state as a link keeps it: a scene that comes from the server is not in it. */
  linked(): State {
    const state = this.current();
    if (state.model.page === "") return state;
    const { expr, leaves, nodes, letters, title, note } = DEFAULT;
    return { ...state, expr, leaves, nodes, letters, title, note };
  }

  /** Puts the state into the page's address. */
  async write(): Promise<void> {
    this.written = await encode(this.linked());
    history.replaceState(null, "", `#${this.written}`);
    this.panel.update();
  }

  private keepCamera(): void {
    if ($("canvas").hidden) return;
    this.state = { ...this.state, camera: this.view.camera.pose };
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
      const { part, board, start, pieces, positions } = await fetchPage(this.state.model);
      if (load !== this.loads) return;
      if (part) this.state = board ? { ...this.state, ...part } : checked({ ...this.state, ...part });
      this.start = start;
      $("board").hidden = !board;
      $("canvas").hidden = Boolean(board);
      let found: Shown | null = null;
      if (board) {
        found = await drawBoard(board, this.state, this.dark, this.linked());
        if (load !== this.loads) return;
        this.trees = [];
        $("board").replaceChildren(found.element);
      } else {
        const trees = parse(this.state.expr);
        shapes(trees, this.state.leaves);
        const faces = await evaluateFaces(trees, this.state);
        if (load !== this.loads) return;
        this.trees = trees;
        this.inspector.trees = trees;
        this.inspector.tokens = { pieces, letters: this.state.letters, positions };
        this.view.show(trees, this.state, faces, this.dark, start);
        this.player.setCursor(this.state.cursor);
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

  // -- looking closer --------------------------------------------------------------------------------------------

  /** Shows the whole scene again. */
  showAll(): void {
    this.look(this.start ? WHOLE : "", DEFAULT.camera);
  }

  /** Brings a matrix near. */
  goTo(key: string, frame = 0): void {
    this.look(key, [...this.view.camera.facing(key, frame), 0, 0, 0, 0]);
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
    this.view.camera.insets = insets;
    if (this.state.camera[2] === 0) this.view.camera.setFocus(this.state.focus, this.state.camera);
  }
  private fitted = "";

  inspect(picked: Picked | null, pin = false): void {
    this.inspector.show(picked, pin, this.dark);
  }

  /** Keeps an element and brings it near; null if the matrix has no such element. */
  lookUp(key: string, i: number, j: number): Picked | null {
    const picked = this.inspector.valueAt(key, i, j);
    if (picked) this.view.camera.approach(picked);
    this.inspect(picked, true);
    return picked;
  }
}

const app = new App();
(window as unknown as { colonnade: unknown }).colonnade = hooks(app);
void app.begin();
