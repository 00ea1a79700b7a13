"""The viewer in a running server: the page at /look/ and its API at /v1/look/, for the admin key only."""

from fastapi import FastAPI, Request, Response

from colonnade.look.app import MAX_BODY, PREFIX, Answer, error_answer, page_headers, static_file
from colonnade.serve.look import answer_of, question
from colonnade.serve.served_models import ServedModels


def install_look(app: FastAPI, models: ServedModels) -> None:
    """Add the routes to ``app``; they show the first model, on one of its replicas."""
    headers = page_headers()

    def respond(answer: Answer) -> Response:
        return Response(answer.body, answer.status, headers, media_type=answer.content_type)

    @app.get("/look", include_in_schema=False)
    async def redirect() -> Response:
        return Response(status_code=308, headers={**headers, "Location": "look/"})

    @app.head("/look/{path:path}", include_in_schema=False)
    @app.get("/look/{path:path}", include_in_schema=False)
    async def page(path: str) -> Response:
        return respond(static_file(path) or error_answer("there is no such page", 404))

    @app.get(PREFIX + "{path:path}", include_in_schema=False)
    @app.post(PREFIX + "{path:path}", include_in_schema=False)
    async def look(path: str, request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_BODY:
            return respond(error_answer(f"send a body of at most {MAX_BODY:,} bytes", 413))
        query = request.scope["query_string"].decode("latin-1")
        name, engine = models.all[0]
        asked = question(name, request.method, path, query, body)
        return respond(answer_of(await engine.ask("look", **asked)))
