"""Report pages: one HTML file with tables and plots (SVG), readable without a network, light and dark."""

import html
import io
from collections.abc import Callable, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; background: #fff; border-radius: 6px; padding: .5rem; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: #444; }
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; numbers with separators, all text escaped."""

    def cells(values: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(_text(value))}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows)
    return f"<table>\n<tr>{cells(columns, 'th')}</tr>\n{body}</table>\n"


def plot(title: str, draw: Callable[[Any], None], height: float = 3.2) -> str:
    """A figure drawn by ``draw(axes)``; the output is deterministic."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "colonnade", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8, height), layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    label = html.escape(title, quote=True)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f"<figure>\n{svg}<figcaption>{html.escape(title)}</figcaption>\n</figure>\n"


def page(title: str, parts: Sequence[str]) -> str:
    """The page; ``parts`` are HTML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{html.escape(title)}</h1>\n{''.join(parts)}</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """A heading of the second level."""
    return f"<h2>{html.escape(text)}</h2>\n"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>\n"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
