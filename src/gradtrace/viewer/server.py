"""The web application: our own static files, and a run's data by integer ids. See `security` for the gate."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gradtrace.instruments.counterfactual.columns import MeasuredGroup
from gradtrace.trace.columns import KINDS
from gradtrace.trace.reader import StepUnreadableError
from gradtrace.trace.step import Step
from gradtrace.viewer.catalog import RunCatalog, ServedRun, run_news, state_of
from gradtrace.viewer.counterfactual import (
    MOST_K,
    ResampleJob,
    Sampling,
    counterfactual_payload,
    measured_group,
    token_payload,
)
from gradtrace.viewer.counterfactual import Request as ResampleRequest
from gradtrace.viewer.group import (
    group_payload,
    group_tokens,
    json_bytes,
    miniatures,
    pairwise_block,
    pairwise_column,
    points,
    points_payload,
    step_payload,
)
from gradtrace.viewer.pages import (
    AblationUnreadableError,
    ablation_payload,
    instrument_page,
    kind_of,
    navigation,
    response_payload,
)
from gradtrace.viewer.scores import SCORES, ScoredStep
from gradtrace.viewer.search import LOOKS, Query, prompt_key, search
from gradtrace.viewer.security import Access, Gate
from gradtrace.viewer.story import group_books, group_story, run_story, step_story

LONGEST_QUERY = 200
SMALLEST_COMPRESSED = 1400
"""Answers that fit into one packet are not worth compressing."""


STATIC = Path(__file__).parent / "static"
STATIC_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@lru_cache(maxsize=1)
def static_files() -> dict[str, bytes]:
    """Every file of static/ by its path there. Requests are looked up here and never reach the file system."""
    paths = (path for path in sorted(STATIC.rglob("*")) if path.suffix in STATIC_TYPES)
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}


def create_app(catalog: RunCatalog, access: Access, sampling: Sampling | None = None) -> Starlette:
    """`sampling`: what "resample from here" works with; without it the viewer never writes."""
    job = ResampleJob(sampling) if sampling is not None else None
    routes = [
        Route("/", _static),
        Route("/static/{name:path}", _static),
        *(
            Route(f"/api/{path}", _answer(catalog, handler, job), methods=["POST"])
            for path, handler in POSTS.items()
            if job is not None
        ),
        *(Route(f"/api/{path}", _answer(catalog, handler, job)) for path, handler in API.items()),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Gate, access=access)],
        exception_handlers={HTTPException: _error, 500: _error},
    )


async def _static(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    body = static_files().get(name)
    if body is None:
        raise HTTPException(404, "no such file")
    return tagged(request, body, f"{STATIC_TYPES[Path(name).suffix]}; charset=utf-8")


async def _error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        error = HTTPException(500, "the viewer failed; its terminal says where")
    body = json_bytes({"error": error.detail})
    return Response(body, error.status_code, media_type=JSON, headers=dict(error.headers or {}))


Answer = tuple[bytes, str]
"""A body and its media type."""
Handler = Callable[["Question"], Answer]


def _answer(catalog: RunCatalog, handler: Handler, job: ResampleJob | None) -> Callable[[Request], Any]:
    """Runs a handler off the event loop (it reads files) and sends what it returns with an ETag."""

    async def endpoint(request: Request) -> Response:
        body, kind = await run_in_threadpool(handler, Question(catalog, request, job))
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


def as_json(value: Any) -> Answer:
    return json_bytes(value), JSON


def as_floats(body: bytes | None) -> Answer:
    if body is None:
        raise HTTPException(404, "the effects on single responses were not stored for this one")
    return body, BINARY


class Question:
    """A request, and what the numbers in its path stand for. What is not there is a 404, what is damaged a 422."""

    def __init__(self, catalog: RunCatalog, request: Request, job: ResampleJob | None = None) -> None:
        self.catalog = catalog
        self.job = job
        self.query = request.query_params
        self.path: dict[str, Any] = request.path_params

    def number(self, name: str) -> float:
        """A query parameter that must be a plain non-negative number; 0 where it is missing."""
        text = self.query.get(name, "")
        if len(text) > 20 or not text.isascii() or (text and not text.replace(".", "", 1).isdigit()):
            raise HTTPException(400, f"{name} must be a number")
        return float(text or 0)

    @property
    def score(self) -> str:
        score = self.query.get("score", SCORES[0])
        if score not in SCORES:
            raise HTTPException(400, f"score is one of {', '.join(SCORES)}")
        return score

    @cached_property
    def served(self) -> ServedRun:
        served = self.catalog.get(self.path["run"])
        if served is None:
            raise HTTPException(404, "no such run")
        return served

    @cached_property
    def view(self) -> ScoredStep:
        view = readable(lambda: self.catalog.step_view(self.served, self.path["step"]))
        if view is None:
            raise HTTPException(404, f"no trace of step {self.path['step']}")
        return view

    def below(self, count: int, name: str, whole: str) -> int:
        """The number in the path that counts one of the `count` that `whole` has."""
        index: int = self.path[name]
        if index >= count:
            raise HTTPException(404, f"{whole} has {count} {'token' if name == 'position' else name}s")
        return index

    @property
    def group(self) -> int:
        return self.below(self.view.n_groups, "group", f"step {self.view.step}")

    @property
    def response(self) -> int:
        """A response of the group."""
        return self.below(len(self.view.members(self.group)), "response", "the group")

    @property
    def position(self) -> int:
        """A token of the response."""
        response = self.view.members(self.group)[self.response]
        return self.below(int(self.view.lengths[response]), "position", "the response")

    @cached_property
    def measured(self) -> MeasuredGroup | None:
        """Counterfactual values of the group, where there are any."""
        return measured_group(self.view, self.group)

    @cached_property
    def trace(self) -> Step:
        """The step of the instrument whose page is named in the path."""
        kind = kind_of(self.path["page"])
        if kind is None:
            raise HTTPException(404, "no such page")
        found = readable(lambda: self.catalog.trace_step(self.served, kind, self.path["step"]))
        if found is None:
            raise HTTPException(404, f"no {kind} of step {self.path['step']}")
        return found


T = TypeVar("T")


def readable(read: Callable[[], T]) -> T:
    try:
        return read()
    except (StepUnreadableError, AblationUnreadableError) as error:
        raise HTTPException(422, str(error)) from error


def runs(question: Question) -> Answer:
    catalog = question.catalog
    listed = catalog.refresh()
    items = [
        {
            "id": served.id,
            "name": served.name,
            "state": state_of(served.run),
            "traced_steps": len({step for kind in KINDS for step in served.entries(kind)}),
        }
        for served in listed
    ]
    default = [served.id for served in listed if served.id < catalog.given] or [s.id for s in listed[:1]]
    return as_json({"runs": items, "default": sorted(default), "skipped": catalog.skipped, "instruments": navigation()})


def news(question: Question) -> Answer:
    newest = {kind: question.number(kind) for kind in KINDS}
    offset, file = int(question.number("metrics")), int(question.number("metrics_file"))
    return as_json(run_news(question.served, offset, file, newest))


def told_run(served: ServedRun) -> str:
    return run_story(served.run.metrics()[0], served.run.findings())


def told_step(view: ScoredStep, served: ServedRun) -> dict[str, Any]:
    """The table of groups, and the sentence above it."""
    found = [each for each in served.run.findings() if each["step"] == view.step]
    return {**step_payload(view, served.vocabulary), "story": step_story(view, served.vocabulary, found)}


def told_group(view: ScoredStep, g: int, served: ServedRun, measured: MeasuredGroup | None) -> dict[str, Any]:
    """A group's structure, and the sentences that it begins with."""
    story = group_story(view, g, served.vocabulary, measured).as_json()
    books = group_books(view, g, served.vocabulary)
    told = {"story": story, "books": None if books is None else books.as_json()}
    return {**group_payload(view, g, served.vocabulary), **told}


def find(question: Question) -> Answer:
    """A search of the run, or, below a group, what became of its prompt."""
    what, text = question.query.get("what", "prompt"), question.query.get("q", "")
    if what not in LOOKS or (what == "prompt") != ("group" in question.path):
        raise HTTPException(400, f"what is one of {', '.join(name for name in LOOKS if name != 'prompt')}")
    if what in ("text", "token") and not 0 < len(text) <= LONGEST_QUERY:
        raise HTTPException(400, f"say what to look for, in at most {LONGEST_QUERY} characters")
    prompt = prompt_key(question.view, question.group) if what == "prompt" else ""
    return as_json(search(question.served, Query(what, text, prompt), int(question.number("from"))))


def ablation(question: Question) -> Answer:
    table = readable(lambda: ablation_payload(question.served.run.path))
    if table is None:
        raise HTTPException(404, "this folder holds no ablation")
    return as_json(table)


def instrument(question: Question) -> Answer:
    step, served = question.trace, question.served
    groups = traced_groups(question.catalog, served, step.step)
    return as_json(instrument_page(step.kind).payload(step, served.vocabulary, groups))


def traced_groups(catalog: RunCatalog, served: ServedRun, step: int) -> dict[int, int]:
    """group_id → index on the group page; empty where the step has no token traces that can be read."""
    try:
        view = catalog.step_view(served, step)
    except StepUnreadableError:
        return {}
    return {} if view is None else {int(g): index for index, g in enumerate(view.need("group_id"))}


def instrument_response(question: Question) -> Answer:
    step = question.trace
    response = question.below(step.n_responses, "response", f"step {step.step}")
    return as_json(response_payload(step, response, question.served.vocabulary))


def counterfactual(question: Question) -> Answer:
    job, path = question.job, question.served.run.path
    return as_json(
        {
            "measured": counterfactual_payload(question.measured),
            "resample": job is not None and path in job.sampling.runs(),
            "run": str(path),
        }
    )


def continuations(question: Question) -> Answer:
    if question.measured is None:
        raise HTTPException(404, "no counterfactual values of this group")
    where = (question.response, question.position)
    return as_json(token_payload(question.measured, *where, question.served.vocabulary))


def resample(question: Question) -> Answer:
    job, path = question.job, question.served.run.path
    if job is None or path not in job.sampling.runs():
        raise HTTPException(403, f"start the viewer with `gradtrace view {path} --resample` to sample from this run")
    k = int(question.number("k"))
    if not 1 <= k <= MOST_K:
        raise HTTPException(400, f"k is at least 1 and at most {MOST_K}")
    wanted = ResampleRequest(path, question.view.step, question.group, question.response, question.position, k)
    if why := job.start(wanted, question.served.id):
        raise HTTPException(409, why)
    return as_json(job.state())


def cancel(question: Question) -> Answer:
    assert question.job is not None
    question.job.cancel()
    return as_json(question.job.state())


STEP = "runs/{run:int}/steps/{step:int}"
GROUP = STEP + "/groups/{group:int}"
API: dict[str, Handler] = {
    "runs": runs,
    "runs/{run:int}/news": news,
    "runs/{run:int}/ablation": ablation,
    "runs/{run:int}/findings": lambda q: as_json({"findings": q.served.run.findings()}),
    "runs/{run:int}/story": lambda q: as_json({"sentence": told_run(q.served)}),
    STEP: lambda q: as_json(told_step(q.view, q.served)),
    f"{STEP}/miniatures": lambda q: as_floats(miniatures(q.view, q.score)),
    f"{STEP}/tokens": lambda q: as_json(points_payload(q.view, q.served.vocabulary)),
    f"{STEP}/points": lambda q: as_floats(points(q.view, q.score, q.served.vocabulary)),
    GROUP: lambda q: as_json(told_group(q.view, q.group, q.served, q.measured)),
    f"{GROUP}/tokens": lambda q: as_floats(group_tokens(q.view, q.group, q.served.vocabulary)),
    f"{GROUP}/pairwise/{{response:int}}": lambda q: as_floats(pairwise_block(q.view, q.group, q.response)),
    f"{GROUP}/pairwise/on/{{response:int}}": lambda q: as_floats(pairwise_column(q.view, q.group, q.response)),
    "runs/{run:int}/find": find,
    f"{GROUP}/history": find,
    f"{GROUP}/counterfactual": counterfactual,
    f"{GROUP}/counterfactual/{{response:int}}/{{position:int}}": continuations,
    "resample": lambda q: as_json(q.job.state() if q.job is not None else {"state": "off"}),
    f"{STEP}/{{page}}": instrument,
    f"{STEP}/{{page}}/responses/{{response:int}}": instrument_response,
}
POSTS: dict[str, Handler] = {
    f"{GROUP}/resample/{{response:int}}/{{position:int}}": resample,
    "resample/cancel": cancel,
}
