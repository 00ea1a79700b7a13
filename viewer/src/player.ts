/** Plays the animation of a scene: steps of its products, over and over. */

import { narrate } from "./animation";
import type { App } from "./main";
import type { Panel } from "./panel";
import type { View } from "./view";

export class Player {
  cursor = 0;
  private lastStep = 0;
  /** Steps until the sweep starts again. */
  private resting = 0;

  constructor(private readonly app: App, private readonly view: View, private readonly panel: Panel, private readonly canvas: HTMLElement) {}

  /** Whether steps are due. */
  get moving(): boolean {
    return this.app.state.playing && this.total > 0;
  }

  /** Steps of the whole animation. */
  get total(): number {
    return this.view.plan.total;
  }

  /** Shows the scene after `cursor` steps. */
  setCursor(cursor: number): void {
    this.cursor = Math.max(0, Math.min(this.total, Math.round(cursor)));
    this.view.setCursor(this.cursor);
    this.panel.progress(this.cursor, this.total, this.app.state.playing, narrate(this.view.plan, this.cursor));
  }

  /** Steps by hand. */
  step(by: number): void {
    this.play(false);
    this.setCursor(this.cursor + by);
    void this.app.write();
  }

  play(playing = !this.app.state.playing): void {
    if (playing && this.total === 0) return;
    if (playing && this.cursor >= this.total) this.cursor = 0;
    this.app.state = { ...this.app.state, playing };
    this.lastStep = performance.now();
    this.app.wake();
    this.setCursor(this.cursor);
    if (!playing) void this.app.write();
  }

  /** Makes the steps that are due. */
  tick(now: number): void {
    if (!this.app.state.playing || this.total === 0 || this.canvas.hidden) {
      this.lastStep = now;
      return;
    }
    const steps = Math.floor(((now - this.lastStep) / 1000) * this.app.state.speed);
    if (steps < 1) return;
    this.lastStep += (steps * 1000) / this.app.state.speed;
    // After the end the whole result stays for two seconds, then the sweep starts again.
    const rest = Math.ceil(2 * this.app.state.speed);
    if (this.resting > 0) {
      this.resting -= steps;
      if (this.resting <= 0) this.setCursor(0);
    } else {
      this.setCursor(this.cursor + steps);
      if (this.cursor >= this.total) this.resting = rest;
    }
  }
}
