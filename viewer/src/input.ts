/** Pointer, touch and keyboard in the drawing. */

import type { App } from "./main";
import type { View } from "./view";

/** Milliseconds after which a press keeps the number under it. */
const HOLD_MS = 450;

export function listen(app: App, view: View, canvas: HTMLCanvasElement): void {
  let down: { x: number; y: number; timer: number } | null = null;
  const at = (event: MouseEvent): [number, number] => {
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
    if (event.ctrlKey) app.inspect(view.pick(x, y), true);
    else down = { x, y, timer: window.setTimeout(() => app.inspect(view.pick(x, y), true), HOLD_MS) };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (down && Math.hypot(x - down.x, y - down.y) > 6) release();
    if (event.pointerType === "mouse" && event.buttons === 0 && !app.pinned) app.inspect(view.pick(x, y));
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = at(event);
    if (down && app.pinned) app.inspect(null, true);
    else if (down && event.pointerType !== "mouse") app.inspect(view.pick(x, y), true);
    release();
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    release();
    if (!app.pinned) app.inspect(null);
  });
  canvas.addEventListener("dblclick", (event) => {
    const picked = view.pick(...at(event));
    if (picked) app.goTo(picked.key, picked.frame);
  });
  const keys: Record<string, () => void> = {
    ArrowLeft: () => view.camera.move(-0.1, 0, 1), ArrowRight: () => view.camera.move(0.1, 0, 1),
    ArrowUp: () => view.camera.move(0, 0.1, 1), ArrowDown: () => view.camera.move(0, -0.1, 1),
    "+": () => view.camera.move(0, 0, 1 / 1.15), "=": () => view.camera.move(0, 0, 1 / 1.15), "-": () => view.camera.move(0, 0, 1.15),
    a: () => view.camera.move(0, 0, 1, -0.1), d: () => view.camera.move(0, 0, 1, 0.1),
    w: () => view.camera.move(0, 0, 1, 0, 0.1), s: () => view.camera.move(0, 0, 1, 0, -0.1),
    " ": () => app.player.play(), ",": () => app.player.step(-1), ".": () => app.player.step(1),
    "0": () => app.showAll(),
    f: () => app.focusNext(),
    g: () => void app.change({ guides: !app.state.guides }), l: () => void app.change({ legends: !app.state.legends }),
    Escape: () => app.inspect(null, true),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]!();
  });
}
