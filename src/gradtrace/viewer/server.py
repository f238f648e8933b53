"""The web application: our own static files, and a run's data by integer ids. See `security` for the gate."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.schema import KINDS
from gradtrace.trace.step import Step
from gradtrace.viewer import payload
from gradtrace.viewer.ablation_payload import AblationUnreadableError, ablation_payload
from gradtrace.viewer.catalog import RunCatalog, ServedRun, last_activity
from gradtrace.viewer.instrument_pages import instrument_page, kind_of, navigation
from gradtrace.viewer.news import run_news, state_of
from gradtrace.viewer.response_payload import response_payload
from gradtrace.viewer.security import Access, Gate
from gradtrace.viewer.step_view import SCORES, StepView

SMALLEST_COMPRESSED = 1400
"""Answers that fit into one packet are not worth compressing."""


@lru_cache(maxsize=1)
def static_files() -> dict[str, bytes]:
    """Every file of static/ by its path there. Requests are looked up here and never reach the file system."""
    found: dict[str, bytes] = {}

    def walk(folder: Any, prefix: str) -> None:
        for item in sorted(folder.iterdir(), key=lambda item: item.name):
            if item.is_dir():
                walk(item, f"{prefix}{item.name}/")
            elif item.name.endswith((".html", ".css", ".js", ".svg")):
                found[prefix + item.name] = item.read_bytes()

    walk(files("gradtrace.viewer") / "static", "")
    return found


def create_app(catalog: RunCatalog, access: Access) -> Starlette:
    routes = [
        Route("/", _page),
        Route("/static/{name:path}", _static),
        *(Route(f"/api/{path}", _answer(catalog, handler)) for path, handler in API.items()),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Gate, access=access)],
        exception_handlers={HTTPException: _error, 500: _error},
    )


async def _page(request: Request) -> Response:
    return tagged(request, static_files()["index.html"], "text/html; charset=utf-8")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    body = static_files().get(name)
    if body is None:
        raise HTTPException(404, "no such file")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    kind = "text/javascript" if name.endswith(".js") else kind
    return tagged(request, body, f"{kind}; charset=utf-8")


async def _error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = (
        error.detail if isinstance(error, HTTPException) else "the viewer failed; its terminal says where"
    )
    headers = error.headers if isinstance(error, HTTPException) else None
    body = payload.json_bytes({"error": detail})
    return Response(body, status, media_type="application/json", headers=dict(headers or {}))


Handler = Callable[[RunCatalog, Request], "tuple[bytes, str]"]


def _answer(catalog: RunCatalog, handler: Handler) -> Callable[[Request], Any]:
    """Runs a handler off the event loop (it reads files) and sends what it returns with an ETag."""

    async def endpoint(request: Request) -> Response:
        body, kind = await run_in_threadpool(handler, catalog, request)
        return tagged(request, body, kind)

    return endpoint


def tagged(request: Request, body: bytes, kind: str) -> Response:
    """200 with an ETag, or 304 if the browser has exactly this already. Text is compressed, floats are not."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    accepts_gzip = "gzip" in request.headers.get("accept-encoding", "")
    if accepts_gzip and len(body) >= SMALLEST_COMPRESSED and kind != BINARY:
        body = gzip.compress(body, compresslevel=5, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers, media_type=kind)


JSON = "application/json"
BINARY = "application/octet-stream"


def as_json(value: Any) -> tuple[bytes, str]:
    return payload.json_bytes(value), JSON


def as_floats(body: bytes | None) -> tuple[bytes, str]:
    if body is None:
        raise HTTPException(404, "the effects on single responses were not stored for this one")
    return body, BINARY


def _number(request: Request, name: str, default: float = 0.0) -> float:
    """A query parameter that must be a plain non-negative number."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if len(text) > 20 or not text.isascii() or not text.replace(".", "", 1).isdigit():
        raise HTTPException(400, f"{name} must be a number")
    return float(text)


def _credit(request: Request) -> str:
    credit = request.query_params.get("credit", "position")
    if credit not in SCORES:
        raise HTTPException(400, f"credit is one of {', '.join(SCORES)}")
    return credit


def _run(catalog: RunCatalog, request: Request) -> ServedRun:
    served = catalog.get(request.path_params["run"])
    if served is None:
        raise HTTPException(404, "no such run")
    return served


def _step(catalog: RunCatalog, request: Request) -> tuple[ServedRun, StepView]:
    served = _run(catalog, request)
    step = request.path_params["step"]
    try:
        view = catalog.step_view(served, step)
    except StepUnreadableError as error:
        raise HTTPException(422, str(error)) from error
    if view is None:
        raise HTTPException(404, f"no trace of step {step}")
    return served, view


def _group(catalog: RunCatalog, request: Request) -> tuple[ServedRun, StepView, int]:
    served, view = _step(catalog, request)
    group = request.path_params["group"]
    if group >= view.n_groups:
        raise HTTPException(404, f"step {view.step} has {view.n_groups} groups")
    return served, view, group


def _response(catalog: RunCatalog, request: Request) -> tuple[StepView, int, int]:
    _, view, group = _group(catalog, request)
    response = request.path_params["response"]
    if response >= len(view.members[group]):
        raise HTTPException(404, f"the group has {len(view.members[group])} responses")
    return view, group, response


def _trace(catalog: RunCatalog, request: Request) -> tuple[ServedRun, Step]:
    """The step of the instrument whose page is named in the path."""
    served, number = _run(catalog, request), request.path_params["step"]
    kind = kind_of(request.path_params["page"])
    if kind is None:
        raise HTTPException(404, "no such page")
    try:
        found = catalog.trace_step(served, kind, number)
    except StepUnreadableError as error:
        raise HTTPException(422, str(error)) from error
    if found is None:
        raise HTTPException(404, f"no {kind} of step {number}")
    return served, found


def runs(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    listed = catalog.refresh()
    items = []
    for served in listed:
        traced = {step for kind in KINDS for step in served.entries(kind)}
        items.append(
            {
                "id": served.id,
                "name": served.name,
                "state": state_of(served.run),
                "traced_steps": len(traced),
                "written": last_activity(served.run.path),
            }
        )
    default = [served.id for served in listed if served.id < catalog.given] or [s.id for s in listed[:1]]
    return as_json(
        {"runs": items, "default": sorted(default), "skipped": catalog.skipped, "instruments": navigation()}
    )


def news(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    newest = {kind: _number(request, kind) for kind in KINDS}
    offset, file = int(_number(request, "metrics")), int(_number(request, "metrics_file"))
    return as_json(run_news(_run(catalog, request), offset, file, newest))


def step(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, view = _step(catalog, request)
    return as_json(payload.step_payload(view, served.vocabulary))


def miniatures(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    _, view = _step(catalog, request)
    return as_floats(payload.miniatures(view, _credit(request)))


def points_structure(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, view = _step(catalog, request)
    return as_json(payload.points_payload(view, served.vocabulary))


def points(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, view = _step(catalog, request)
    return as_floats(payload.points(view, _credit(request), served.vocabulary))


def group(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, view, index = _group(catalog, request)
    return as_json(payload.group_payload(view, index, served.vocabulary))


def group_tokens(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, view, index = _group(catalog, request)
    return as_floats(payload.group_tokens(view, index, served.vocabulary))


def pairwise_block(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    return as_floats(payload.pairwise_block(*_response(catalog, request)))


def pairwise_column(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    return as_floats(payload.pairwise_column(*_response(catalog, request)))


def instrument(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, found = _trace(catalog, request)
    groups = traced_groups(catalog, served, found.step)
    return as_json(instrument_page(found.kind).payload(found, served.vocabulary, groups))


def traced_groups(catalog: RunCatalog, served: ServedRun, step: int) -> dict[int, int]:
    """group_id → index on the group page; empty where the step has no token traces that can be read."""
    try:
        view = catalog.step_view(served, step)
    except StepUnreadableError:
        return {}
    return {} if view is None else {int(g): index for index, g in enumerate(view.layout["group_id"])}


def ablation(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    try:
        table = ablation_payload(_run(catalog, request).run.path)
    except AblationUnreadableError as error:
        raise HTTPException(422, str(error)) from error
    if table is None:
        raise HTTPException(404, "this folder holds no ablation")
    return as_json(table)


def instrument_response(catalog: RunCatalog, request: Request) -> tuple[bytes, str]:
    served, found = _trace(catalog, request)
    response = request.path_params["response"]
    if response >= found.n_responses:
        raise HTTPException(404, f"step {found.step} has {found.n_responses} responses")
    return as_json(response_payload(found, response, served.vocabulary))


API: dict[str, Handler] = {
    "runs": runs,
    "runs/{run:int}/news": news,
    "runs/{run:int}/ablation": ablation,
    "runs/{run:int}/steps/{step:int}": step,
    "runs/{run:int}/steps/{step:int}/miniatures": miniatures,
    "runs/{run:int}/steps/{step:int}/tokens": points_structure,
    "runs/{run:int}/steps/{step:int}/points": points,
    "runs/{run:int}/steps/{step:int}/groups/{group:int}": group,
    "runs/{run:int}/steps/{step:int}/groups/{group:int}/tokens": group_tokens,
    "runs/{run:int}/steps/{step:int}/groups/{group:int}/pairwise/{response:int}": pairwise_block,
    "runs/{run:int}/steps/{step:int}/groups/{group:int}/pairwise/on/{response:int}": pairwise_column,
    "runs/{run:int}/steps/{step:int}/{page}": instrument,
    "runs/{run:int}/steps/{step:int}/{page}/responses/{response:int}": instrument_response,
}
