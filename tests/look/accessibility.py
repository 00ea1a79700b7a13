"""Checks of a page's accessibility: contrast of its texts, names of its controls."""

import re

from tests.look.conftest import Viewer


def _luminance(colour: str) -> float:
    r, g, b = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (r, g, b)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def check_contrast(viewer: Viewer) -> int:
    """Every visible text has a contrast of 4.5 to 1 (WCAG 2.2, 1.4.3); returns the number of texts."""
    texts = "h1, h2, h3, p, a, th, td, span, figcaption, summary, label, button, select, input, textarea, strong"
    pairs = viewer.run(
        f"""[...document.querySelectorAll('{texts}')]
          .filter(e => e.offsetParent && e.id !== 'skip' && (e.textContent.trim() || e.value !== undefined)).map(e => {{
            let ground = e;
            const clear = e => getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)';
            while (ground && clear(ground)) ground = ground.parentElement;
            return [e.tagName, getComputedStyle(e).color, getComputedStyle(ground ?? document.body).backgroundColor];
          }})"""
    )
    for tag, text, ground in pairs:
        a, b = sorted((_luminance(text), _luminance(ground)))
        assert (b + 0.05) / (a + 0.05) >= 4.5, (tag, text, ground)
    return len(pairs)


def unnamed_controls(viewer: Viewer) -> list[str]:
    """Controls without a label, a text or an aria-label."""
    return viewer.run(
        """[...document.querySelectorAll('input, select, textarea, button, a')].filter(e =>
          !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"""
    )
