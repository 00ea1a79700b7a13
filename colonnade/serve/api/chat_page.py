"""The chat page at ``/``: one file, without external resources, that uses this server's own API.

The Content-Security-Policy allows only the file's own script and style, by their hashes, and requests to this server:
even if a model's text became markup, it could not load or run anything. Trusted types prevent the script from turning
text into markup.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib import resources

from fastapi import FastAPI, Response


def add_chat_page(app: FastAPI) -> None:
    """Serve the page at ``/``; it needs no API key, and asks for one if the server does."""
    page = (resources.files("colonnade.serve.api") / "chat_page.html").read_text(encoding="utf-8")
    headers = page_headers(page)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)


def page_headers(page: str, scripts: str = "") -> dict[str, str]:
    """The security headers of ``page``; ``scripts`` are further sources of scripts."""
    policy = [
        "default-src 'none'",
        f"script-src '{_hash_of('script', page)}' {scripts}".rstrip(),
        f"style-src '{_hash_of('style', page)}'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash_of(tag: str, page: str) -> str:
    """The hash of the only ``tag`` element's text, as a policy writes it."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
