"""The pages and their addresses: every one as HTML, and as JSON behind `.json`.

    /runs  /runs/ID  /runs/ID/{curves,config,inputs,log,environment}
    /runs/ID/curves/STAGE/CHART(.csv)
    /artifacts/DIGEST  /artifacts/DIGEST/lineage
    /acceptance?of=HASH&of=HASH  /diff?a=HASH&b=HASH

What a page shows is all in its address. Each request opens the registry read-only and closes it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from kimi_eagle.registry.reading import ReadRegistry, Unusable, told_apart
from kimi_eagle.registry.schema import FILE, RegistryError
from kimi_eagle.registry.store import AmbiguousDigest
from kimi_eagle.ui import templating
from kimi_eagle.ui.trainings import TrainingReader
from kimi_eagle.ui.view import Asked, Moved, View, query_of
from kimi_eagle.ui.views import acceptance, artifact, curves, diff, lineage, run, runs

Show = Callable[..., View | Moved]
_STATIC = templating.HERE / "static"


def site(root: Path) -> Starlette:
    """The application for the registry under a root."""
    reader = TrainingReader(root)

    def page(show: Show) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            return _answer(root, show, request)

        return answer

    shown: list[tuple[str, Show]] = [
        ("/runs", runs.runs),
        ("/runs/{run_id}", run.run),
        ("/runs/{run_id}/curves", lambda a, **p: curves.curves(a, reader, **p)),
        (
            "/runs/{run_id}/curves/{stage}/{name}",
            lambda a, **p: curves.data(a, reader, **p),
        ),
        ("/runs/{run_id}/config", run.config),
        ("/runs/{run_id}/inputs", run.inputs),
        ("/runs/{run_id}/log", run.log),
        ("/runs/{run_id}/environment", run.environment),
        ("/artifacts/{digest}", artifact.artifact),
        ("/artifacts/{digest}/lineage", lineage.lineage),
        ("/acceptance", acceptance.acceptance),
        ("/diff", diff.diff),
    ]
    routes: list[Route | Mount] = [Route("/", lambda _: RedirectResponse("/runs", 303))]
    for path, show in shown:
        for end in (".json", ".csv", ""):
            routes.append(Route(path + end, page(show), methods=["GET"]))
    routes.append(Mount("/static", StaticFiles(directory=_STATIC)))
    routes.append(Route("/{rest:path}", page(_nothing), methods=["GET"]))
    return Starlette(routes=routes)


def _nothing(_asked: Asked, rest: str) -> View:
    raise LookupError(f"there is no page /{rest}")


def _answer(root: Path, show: Show, request: Request) -> Response:
    path = request.url.path
    form = "html"
    for end in ("json", "csv"):
        if path.endswith(f".{end}"):
            path, form = path.removesuffix(f".{end}"), end
    try:
        found = _shown(root, show, request)
    except RegistryError as error:
        found = _unusable(root, error)
    except (LookupError, OSError) as error:
        if isinstance(error, KeyError | IndexError):
            raise
        found = _not_found(error)
    if isinstance(found, Moved):
        query = f"?{request.url.query}" if request.url.query and path != "/runs" else ""
        return RedirectResponse(f"{found.path}{'' if form == 'html' else f'.{form}'}{query}", 303)
    return _response(found, request, path, form)


def _shown(root: Path, show: Show, request: Request) -> View | Moved:
    registry = ReadRegistry(root)
    try:
        with told_apart(root / FILE):
            asked = Asked(root, registry, query_of(request.url.query))
            return show(asked, **request.path_params)
    finally:
        registry.close()


def _response(view: View, request: Request, path: str, form: str) -> Response:
    if form == "csv" and view.csv is None:
        view = _not_found(LookupError(f"{path} has no table to take away as CSV"))
        form = "html"
    if form == "json":
        body = json.dumps(view.document, ensure_ascii=False, allow_nan=False)
        kind = "application/json"
    elif form == "csv":
        body, kind = _csv(view.csv() if view.csv else ()), "text/csv"
    else:
        body = templating.html(view, path=path, query=request.url.query)
        kind = "text/html"
    data = body.encode("utf-8", errors="replace")
    # What is as it was is not sent again: a page that goes on asks every few seconds.
    tag = f'"{blake2b(data, digest_size=12).hexdigest()}"'
    headers = {"etag": tag}
    if view.status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, view.status, headers, f"{kind}; charset=utf-8")


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        ["" if cell is None else cell for cell in row] for row in rows
    )
    return text.getvalue()


def _unusable(root: Path, error: RegistryError) -> View:
    state = error.state if isinstance(error, Unusable) else "unreadable"
    command = error.command if isinstance(error, Unusable) else "kimi-eagle registry check"
    titles = {
        "missing": "No registry yet",
        "locked": "The registry is locked",
        "newer": "The registry is newer than this program",
        "older": "The registry is older than this program",
        "corrupt": "The registry is damaged",
        "unreadable": "The registry cannot be read",
    }
    whole = command.replace("kimi-eagle ", f"kimi-eagle --root {root} ", 1)
    document = {
        "error": str(error),
        "state": state,
        "file": str(root / FILE),
        "command": whole if command.startswith("kimi-eagle ") else command,
    }
    return View("registry_error.html", titles[state], document, status=503)


def _not_found(error: Exception) -> View:
    candidates = error.candidates if isinstance(error, AmbiguousDigest) else ()
    document = {
        "error": str(error),
        "candidates": [{"digest": digest, "kind": kind} for digest, kind in candidates],
    }
    title = "Several have this hash" if candidates else "Not found"
    return View("not_found.html", title, document, status=404)
