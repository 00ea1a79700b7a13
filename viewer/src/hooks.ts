/** What tests and notebooks may ask the page, as `window.colonnade`. */

import { EXAMPLES, TOUR } from "./examples";
import type { App } from "./main";
import { checked, compact, decode, encode, type State } from "./state";

export const hooks = (app: App) => ({
  /** Faces by key: base64 of their float32 values. */
  faces: (): Record<string, { rows: number; cols: number; data: string }> =>
    Object.fromEntries([...app.view.faces].map(([key, { rows, cols, data }]) => {
      let binary = "";
      for (const byte of new Uint8Array(data.buffer, data.byteOffset, data.byteLength)) binary += String.fromCharCode(byte);
      return [key, { rows, cols, data: btoa(binary) }];
    })),
  value: (key: string, i: number, j: number) => app.inspector.valueAt(key, i, j)?.value,
  state: (): State => app.current(),
  compact: () => compact(app.linked()),
  camera: () => app.view.camera.pose,
  project: (key: string, i: number, j: number) => app.view.project(key, i, j),
  /** Milliseconds of frames: turned, on this thread; or at rest with all points, until the last pixel is drawn. */
  frames: (count: number, rest = false): number[] =>
    Array.from({ length: count }, () => {
      const start = performance.now();
      if (!rest) app.view.camera.move(0.01, 0, 1);
      app.view.draw(true);
      if (rest) app.view.finish();
      return performance.now() - start;
    }),
  total: () => app.player.total,
  labels: () => app.view.labels.taken,
  cursor: () => app.player.cursor,
  /** Opens a link without a new page; resolves when it is drawn. */
  open: (link: string): Promise<void> => {
    history.replaceState(null, "", `#${link}`);
    return app.open(link);
  },
  encode, decode, examples: EXAMPLES, tour: TOUR, checked,
});
