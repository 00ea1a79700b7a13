"""The page at ``/speech``: microphone and camera in a browser, live text. It uses this server's API."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from colonnade.serve.api.chat_page import page_headers


def page_routes() -> list[Route]:
    """Routes of the page and its audio worklet; they need no API key, but the page asks for one to connect."""
    files = resources.files("colonnade.speech.page")
    html, worklet = ((files / name).read_text(encoding="utf-8") for name in ("speech.html", "worklet.js"))
    headers = page_headers(html, scripts="'self'") | {"Permissions-Policy": "camera=(self), microphone=(self)"}

    async def page(_: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    async def script(_: Request) -> Response:
        return Response(worklet, media_type="text/javascript", headers={"X-Content-Type-Options": "nosniff"})

    return [Route("/speech", page), Route("/speech/worklet.js", script)]
