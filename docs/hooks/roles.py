"""Docstrings name things as Sphinx does, :class:`~package.Name`; the site shows them as code, by their last name."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(~?)([\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites the roles of every docstring before it is read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(_code, obj.docstring.value)


def _code(found: re.Match[str]) -> str:
    name = found[2]
    return f"`{name.rsplit('.', 1)[-1] if found[1] else name}`"
