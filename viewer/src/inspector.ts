/** The number under the pointer, or the one that is kept: its value, its tokens, and where it is on the screen. */

import { digits, shown, tokensAt, type Tokens } from "./describe";
import { products, type Tree } from "./expression";
import type { Picked } from "./picking";
import type { View } from "./view";

export class Inspector {
  /** The number that stays until another is kept. */
  pinned: Picked | null = null;
  private picked: Picked | null = null;
  trees: readonly Tree[] = [];
  tokens: Tokens = { pieces: [], letters: {}, positions: {} };

  constructor(private readonly view: View, private readonly stage: HTMLElement, private readonly box: HTMLElement) {}

  /** The element of a matrix; null outside of it. */
  valueAt(key: string, i: number, j: number): Picked | null {
    const face = this.view.faces.get(key);
    if (!face || !(i >= 0 && i < face.rows && j >= 0 && j < face.cols)) return null;
    return { key, i, j, value: face.data[i * face.cols + j]!, frame: 0 };
  }

  show(picked: Picked | null, pin: boolean, dark: boolean): void {
    if (pin) this.pinned = picked;
    this.picked = picked;
    this.view.mark(picked, dark);
    this.box.hidden = !picked;
    if (!picked) return;
    const { key, i, j, value } = picked;
    const tree = this.trees.flatMap(products).find((each) => each.key === key) ?? ({ kind: "leaf", name: key, position: 0 } as const);
    const said = tokensAt(tree, i, j, this.tokens);
    this.box.textContent = `${shown(tree)} [${i}, ${j}] = ${digits(value)}${said && `  ${said}`}`;
    this.place();
  }

  clear(): void {
    this.pinned = this.picked = null;
    this.box.hidden = true;
  }

  /** Puts the number beside its element, where the camera sees it now. */
  place(): void {
    if (!this.picked) return;
    const { key, i, j, frame } = this.picked;
    const at = this.view.project(key, i, j, frame);
    const { clientWidth: width, clientHeight: height } = this.stage;
    const [x, y] = at ?? [-1, -1];
    const seen = x >= 0 && y >= 0 && x <= width && y <= height;
    this.box.style.visibility = seen ? "visible" : "hidden";
    this.box.style.left = `${Math.max(4, Math.min(width - this.box.clientWidth - 4, x + 14))}px`;
    this.box.style.top = `${Math.max(4, Math.min(height - 30, y - 34))}px`;
  }
}
