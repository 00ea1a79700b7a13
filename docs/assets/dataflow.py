"""Draws the data flow as two SVG files, for light and dark pages: python docs/assets/dataflow.py"""

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 980, 452
SANS = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Colours:
    """The inks of one variant."""

    text: str
    faint: str
    line: str
    train: str
    serve: str
    model: str
    store: str


LIGHT = Colours("#1f2328", "#59636e", "#59636e", "#dbeafe", "#dcfce7", "#f6f8fa", "#fef3c7")
DARK = Colours("#f0f6fc", "#9198a1", "#9198a1", "#12315c", "#113d24", "#161b22", "#4a3a0c")


class Drawing:
    """Boxes, words and arrows, collected as SVG elements."""

    def __init__(self, colours: Colours):
        self.colours = colours
        self.parts: list[str] = []

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        *,
        ink: str = "",
        mono: bool = False,
        weight: int = 400,
        anchor: str = "middle",
    ) -> None:
        """One line of text; ``y`` is its base line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{MONO if mono else SANS}" font-size="{size:g}" '
            f'font-weight="{weight}" text-anchor="{anchor}" fill="{ink or self.colours.text}">{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        lines: list[str],
        *,
        mono: int = -1,
        dashed: bool = False,
    ) -> None:
        """A rounded box; its first line is its name, the others are faint; line ``mono`` is code."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{fill}" '
            f'stroke="{self.colours.line}" stroke-width="1"{dash}/>'
        )
        top = y + h / 2 - (len(lines) - 1) * 8 + 4.5
        for i, line in enumerate(lines):
            ink = self.colours.faint if i else self.colours.text
            self.words(x + w / 2, top + 16 * i, line, 13 if i == 0 else 11, ink=ink, mono=i == mono)

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through ``points`` with a tip at the last."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{self.colours.line}" stroke-width="1.4" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{self.colours.line}"/></marker></defs>'
        )
        label = "Data flow: one forward pass trains on text, saves one checkpoint and serves requests"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{label}">\n{tip}\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def draw(colours: Colours) -> str:
    """The picture: training above, serving below, one model between them."""
    d = Drawing(colours)
    c = colours

    d.words(20, 28, "Training", 14, weight=600, anchor="start")
    d.box(20, 40, 116, 52, c.train, ["text files", "or JSONL, Parquet"])
    d.box(160, 40, 140, 52, c.train, ["token shards", "BPE, documents"])
    d.box(324, 40, 196, 52, c.train, ["Batch", "tokens_T positions_T targets_T"])
    d.box(578, 40, 104, 52, c.train, ["loss", "mean over tokens"])
    d.box(706, 40, 116, 52, c.train, ["backward", "one norm, clip"])
    d.box(846, 40, 114, 52, c.train, ["AdamW", "float32 masters"])
    d.arrow((136, 66), (158, 66))
    d.arrow((300, 66), (322, 66))
    d.arrow((682, 66), (704, 66))
    d.arrow((822, 66), (844, 66))

    d.box(160, 148, 560, 156, c.model, [])
    d.words(440, 174, "out = model(stream, attend, head)", 15, mono=True, weight=600)
    d.box(178, 192, 84, 60, c.model, ["embed", "vocabulary", "parallel"])
    d.box(286, 192, 268, 60, c.model, [], dashed=True)
    d.words(420, 209, "L blocks", 11, ink=c.faint)
    for x, w, name in ((294, 44, "norm"), (352, 76, "attention"), (442, 44, "norm"), (500, 46, "FFN")):
        d.box(x, 216, w, 28, c.model, [name])
    for x in (338, 428, 486):
        d.arrow((x, 230), (x + 13, 230))
    d.box(578, 192, 50, 60, c.model, ["norm"])
    d.box(652, 192, 54, 60, c.model, ["head"])
    for x in (262, 554, 628):
        d.arrow((x, 222), (x + 23, 222))
    d.words(
        440,
        274,
        "the same code on one CPU and on a mesh (tp, dp): collectives are methods of an Axis,",
        11.5,
        ink=c.faint,
    )
    d.words(440, 290, "and on an axis of size 1 they return their input", 11.5, ink=c.faint)

    d.box(
        790,
        178,
        170,
        96,
        c.store,
        ["checkpoint", "weights, optimizer, config,", "tokenizer, data position;", "loads under any plan"],
    )
    d.arrow((903, 92), (903, 176))
    d.arrow((790, 226), (722, 226))
    d.words(755, 218, "weights", 11, ink=c.faint)

    d.arrow((422, 92), (422, 146))
    d.words(414, 124, "attend = Packed", 12, mono=True, anchor="end")
    d.arrow((630, 148), (630, 94))
    d.words(622, 124, "head = Loss", 12, mono=True, anchor="end")

    d.words(20, 436, "Serving", 14, weight=600, anchor="start")
    d.box(20, 362, 116, 52, c.serve, ["request", "HTTP, or Python"])
    d.box(160, 362, 140, 52, c.serve, ["tokenizer", "chat template"])
    d.box(324, 362, 196, 52, c.serve, ["scheduler", "requests, pages, token budget"])
    d.box(578, 362, 104, 52, c.serve, ["logits", "wanted rows"])
    d.box(706, 362, 116, 52, c.serve, ["sampler", "temperature, …"])
    d.box(846, 362, 114, 52, c.serve, ["text", "streamed"])
    d.arrow((136, 388), (158, 388))
    d.arrow((300, 388), (322, 388))
    d.arrow((682, 388), (704, 388))
    d.arrow((822, 388), (844, 388))
    d.arrow((422, 362), (422, 306))
    d.words(414, 338, "attend = Paged", 12, mono=True, anchor="end")
    d.arrow((630, 304), (630, 360))
    d.words(622, 338, "head = Rows", 12, mono=True, anchor="end")
    d.arrow((764, 414), (764, 440), (422, 440), (422, 416))
    d.words(593, 434, "next token", 11, ink=c.faint)
    return d.svg()


def main() -> None:
    """Write both files beside this one."""
    folder = Path(__file__).parent
    (folder / "dataflow-light.svg").write_text(draw(LIGHT), encoding="utf-8")
    (folder / "dataflow-dark.svg").write_text(draw(DARK), encoding="utf-8")


if __name__ == "__main__":
    main()
