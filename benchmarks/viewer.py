"""One group of 16 responses × 4,096 tokens in our viewer and in Gradio's HighlightedText, in the same Chromium.

Measured in turns: time to first paint of the tokens, time from a click to the last repaint, bytes sent, DOM nodes.
Gradio gets an environment of its own in ~/.cache/gradtrace-bench/gradio, made on the first run.

Two clicks are timed. On a token: its effect on every response is shown. On a response: the heat map of the whole
group is repainted with every token's effect on it. `speedup_click_repaint` is that of the token, the click the page
is made for; `speedup_target_repaint` that of the response. Gradio draws one column, our page two.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.common import Timing, emit, parse_arguments
from gradtrace import open_run
from gradtrace.commands.view import bind
from gradtrace.viewer.scores import load_step
from tests.browser import find_browser
from tests.viewer.sample import SampleRun
from tests.viewer.sample import prose as sentences
from tests.viewer.sample.groups import prose_group

ENVIRONMENT = Path.home() / ".cache" / "gradtrace-bench" / "gradio"
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

# Runs in the page. `repaint()` waits until nothing has changed for `quiet` ms and gives the time from the last click
# (or from the start of the page) to the frame after the last change.
PROBE = """
window.probe = { clicked: 0, changed: 0, painted: 0, firstToken: 0 };
const selector = %r;
document.addEventListener('click', () => {
  probe.clicked = performance.now();
  probe.changed = probe.painted = 0;
}, true);
new MutationObserver(() => {
  probe.changed = performance.now();
  requestAnimationFrame(() => setTimeout(() => {
    probe.painted = performance.now();
    if (!probe.firstToken && document.querySelector(selector)) probe.firstToken = probe.painted;
  }));
}).observe(document, { childList: true, subtree: true, attributes: true, characterData: true });
window.repaint = async (quiet) => {
  while (!probe.painted || performance.now() - probe.changed < quiet || probe.painted < probe.changed) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return probe.painted - probe.clicked;
};
"""


@dataclass
class Side:
    """One viewer and how to use it."""

    name: str
    url: str
    token: str
    """CSS selector of a token."""
    quiet: int = 500
    first_paint: list[float] = field(default_factory=list)
    token_click: list[float] = field(default_factory=list)
    first_click: list[float] = field(default_factory=list)
    target_click: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    data_bytes: int = 0
    first_click_bytes: int = 0
    target_bytes: int = 0
    nodes: int = 0

    def click_token(self, page: Page, position: int) -> None:
        """Of the topmost response; returns when its effects are there."""
        raise NotImplementedError

    def click_target(self, page: Page) -> None:
        """The topmost response."""
        raise NotImplementedError

    def detail(self) -> dict[str, Any]:
        return {
            "first_paint_s": round(statistics.median(self.first_paint), 3),
            "token_click_ms": round(statistics.median(self.token_click), 1),
            "token_click_range_ms": [round(min(self.token_click), 1), round(max(self.token_click), 1)],
            "first_token_click_ms": round(statistics.median(self.first_click), 1),
            "target_click_ms": round(statistics.median(self.target_click), 1),
            "bytes_to_open": self.bytes_sent,
            "of_that_data": self.data_bytes,
            "bytes_of_first_token_click": self.first_click_bytes,
            "bytes_of_target_click": self.target_bytes,
            "dom_nodes": self.nodes,
            "rounds": len(self.token_click),
        }


class OurSide(Side):
    def click_token(self, page: Page, position: int) -> None:
        page.locator(".row").first.locator(".slot-1 .t").nth(position).click()
        page.wait_for_selector(f".dock h3:has-text(', position {position}')")

    def click_target(self, page: Page) -> None:
        page.locator(".row .response-id").first.click()
        page.wait_for_selector(".legend .target:has-text('on r')")


class GradioSide(Side):
    def click_token(self, page: Page, position: int) -> None:
        page.locator("#response-0 .token").nth(position).click()
        page.wait_for_selector(f"#effects :text('r0, position {position}')")

    def click_target(self, page: Page) -> None:
        page.locator("#button-0").click()
        page.wait_for_selector("#target:text-is('r0')")


def make_run(folder: Path, responses: int, tokens: int) -> Path:
    run = SampleRun(folder / "long", "prose", seed=5, groups=1, responses=responses, total_steps=1)
    rng = np.random.default_rng(5)
    group = prose_group(rng, run.vocabulary, responses, sentences.PROMPT, pass_rate=0.4, at_least=tokens)
    run.write_step(1, [group])
    run.finish()
    return run.path


def gradio_data(run: Path, file: Path) -> None:
    """The same numbers for Gradio."""
    opened = open_run(run)
    view = load_step(opened, 1)
    assert view is not None and opened.token_bytes is not None
    responses = range(view.n_responses)
    ids = np.stack([view.token_id[view.tokens(r)] for r in responses])
    blocks = [view.pairwise(r) for r in responses]
    scores = view.column("influence_position")
    assert scores is not None
    np.savez(
        file,
        texts=np.array([opened.token_bytes[i].decode(errors="replace") for i in range(len(opened.token_bytes))]),
        token=ids,
        influence=np.stack([scores[view.tokens(r)] for r in responses]),
        pairwise=np.stack([block.scores for block in blocks if block is not None]),
    )


def gradio_python() -> Path:
    """The interpreter of Gradio's environment, installed if need be."""
    python = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / ".ready"
    if not ready.exists():
        print(f"installing gradio into {ENVIRONMENT} …", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "gradio"], check=True)
        ready.touch()
    return python


def free_port() -> int:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def process(command: list[str], url: str) -> Iterator[None]:
    """A server that answers at `url`."""
    environment = {
        **os.environ,
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(command, stdout=sys.stderr, env=environment) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                    break
                if server.poll() is not None:
                    sys.exit(f"benchmark: {command[0]} ended with code {server.returncode}; its error is above")
                time.sleep(0.1)
            yield
        finally:
            server.terminate()


def measure(browser: Browser, side: Side, positions: list[int]) -> None:
    """Open the page, click tokens, click a response."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(PROBE % side.token)
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    received = {"all": 0, "data": 0}
    kinds: dict[str, str] = {}
    session.on("Network.responseReceived", lambda event: kinds.update({event["requestId"]: event["type"]}))

    def finished(event: dict[str, Any]) -> None:
        size = int(event["encodedDataLength"])
        received["all"] += size
        if kinds.get(event["requestId"]) in ("Document", "XHR", "Fetch", "EventSource"):
            received["data"] += size

    session.on("Network.loadingFinished", finished)
    page.goto(side.url)
    page.wait_for_selector(side.token)
    page.evaluate(f"repaint({2 * side.quiet})")
    side.first_paint.append(page.evaluate("probe.firstToken") / 1000)
    side.bytes_sent, side.data_bytes = received["all"], received["data"]
    side.nodes = page.evaluate("document.querySelectorAll('*').length")
    for position in positions:
        before = received["all"]
        side.click_token(page, position)
        elapsed = page.evaluate(f"repaint({side.quiet})")
        side.token_click.append(elapsed)
        if position == positions[0]:
            side.first_click.append(elapsed)
            side.first_click_bytes = received["all"] - before
    before = received["all"]
    side.click_target(page)
    side.target_click.append(page.evaluate(f"repaint({side.quiet})"))
    side.target_bytes = received["all"] - before
    context.close()


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    tokens, rounds = (1024, 1) if args.quick else (4096, 3)
    responses = 16
    chromium = find_browser()
    if chromium is None:
        sys.exit("benchmark: needs Chromium; `make browser` installs it")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        run = make_run(folder, responses, tokens)
        gradio_data(run, folder / "group.npz")
        our_port, gradio_port = free_port(), free_port()
        view = [sys.executable, "-m", "gradtrace.cli", "view", str(run), "--no-open", "--port", str(our_port)]
        app = [
            str(gradio_python()),
            str(Path(__file__).with_name("_gradio_app.py")),
            str(folder / "group.npz"),
            str(gradio_port),
        ]
        ours = OurSide("gradtrace", f"http://127.0.0.1:{our_port}/#/group?step=1&group=0", ".row .t")
        theirs = GradioSide("gradio", f"http://127.0.0.1:{gradio_port}/", "#response-0 .token")
        for command, url in ((view, ours.url), (app, theirs.url)):
            stack.enter_context(process(command, url.split("#")[0]))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        order: list[Side] = [theirs, ours]
        for number in range(rounds):
            for side in order:
                measure(browser, side, [20 + number, 40 + number, 30 + number])
            order.reverse()
        browser.close()
        version = subprocess.run(
            [gradio_python(), "-c", "import gradio; print(gradio.__version__)"],
            capture_output=True,
            text=True,
        ).stdout.strip()
    emit(
        "viewer",
        {
            "speedup_click_repaint": Timing(theirs.token_click, ours.token_click),
            "speedup_target_repaint": Timing(theirs.target_click, ours.target_click),
            "speedup_first_paint": Timing(theirs.first_paint, ours.first_paint),
            "speedup_bytes": theirs.bytes_sent / ours.bytes_sent,
            "speedup_dom_nodes": theirs.nodes / ours.nodes,
        },
        {
            "group": f"{responses} responses × {tokens} tokens",
            "theirs": {**theirs.detail(), "gradio": version},
            "ours": ours.detail(),
        },
    )


if __name__ == "__main__":
    main()
