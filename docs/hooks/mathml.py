"""Equations become MathML while the site is built: browsers draw it themselves, so no script is fetched from anywhere.

GitHub draws the same ``$...$`` and ``$$...$$`` in the Markdown.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace what the arithmatex extension marked, by MathML."""

    def mathml(found: re.Match[str]) -> str:
        return convert(html.unescape(found[3]), display="inline" if found[2] == "(" else "block")

    return EQUATION.sub(mathml, content)
