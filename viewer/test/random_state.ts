/** Random states for round trips; the same seed gives the same state. */

import { KINDS } from "../src/animation";
import { SCHEMES } from "../src/geometry";
import { COLOURS, DEFAULT, PAGES, SENSITIVITIES, THEMES, type State } from "../src/state";
import { EPILOGUES, INITS, random, type LeafSpec, type NodeSpec } from "../src/values";

export function randomState(seed: number): State {
  let index = 0;
  const u = () => random(seed, index++);
  const whole = (low: number, high: number) => low + Math.floor(u() * (high - low + 1));
  const pick = <T>(choices: readonly T[]): T => choices[whole(0, choices.length - 1)]!;
  const real = (low: number, high: number) => low + u() * (high - low);
  const leaves: Record<string, LeafSpec> = {};
  const nodes: Record<string, NodeSpec> = {};
  for (let i = whole(0, 12); i > 0; i--)
    leaves[pick(["A", "B_t", "w.x", "_9", `n${i}`])] = {
      rows: whole(1, 300), cols: whole(1, 300), init: pick(INITS), seed: whole(0, 99), low: real(-2, 0), sparsity: u(),
    };
  for (let i = whole(0, 6); i > 0; i--)
    nodes[pick(["Q", "@0", "@0LR", `p${i}`])] = { epilogue: pick(EPILOGUES), i: whole(1, 9), scale: real(0, 3) };
  return {
    ...DEFAULT,
    expr: pick(["A @ B", "x = A @ (y = B @ C)", "é <b> & \" ' 𝔸 #?%", ""]),
    leaves, nodes,
    places: u() < 0.5 ? { Q: { polarity: whole(0, 1), left: whole(0, 1), right: whole(0, 1), result: whole(0, 1) } } : {},
    letters: u() < 0.5 ? { A: ["T", "D"] } : {},
    plan: u() < 0.5 ? { tp: whole(1, 8), cp: whole(1, 8) } : {},
    title: pick(["", "A title — ünï"]),
    model: { page: pick(PAGES), text: pick(["", "some text\n"]), layer: whole(0, 30), head: whole(0, 30), rank: whole(1, 64) },
    scheme: pick(SCHEMES), gap: real(1, 20), scatter: real(0, 50), anim: pick(KINDS), fuse: u() < 0.5,
    speed: real(0.1, 50), cursor: whole(0, 10000), playing: u() < 0.5, sensitivity: pick(SENSITIVITIES),
    colour: pick(COLOURS), size: real(0.2, 3), guides: u() < 0.5, legends: u() < 0.5, theme: pick(THEMES),
    camera: [real(-3, 3), real(-1, 1), real(1, 9), real(-5, 5), real(-5, 5), real(-5, 5)],
    focus: pick(["", "*", "attn"]), tour: whole(0, 8),
  };
}
