"""The ablation page in real Chromium, on the table that `gradtrace ablate collect` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace.commands.ablate.results import COLUMNS
from gradtrace.commands.report import make_report
from gradtrace.viewer.pages import AblationUnreadableError, ablation_payload
from tests.viewer.serving import Watched, serving

MODES, FACTORS = ("inverse", "identity"), ("0", "8")


def table() -> dict[str, Any]:
    cells = []
    for i, mode in enumerate(MODES):
        for j, factor in enumerate(FACTORS):
            done = (i, j) != (1, 1)
            numbers = {
                "time_s": 1.0 + i - 0.4 * j,
                "peak_bytes": (3 + i + j) * 2**20,
                "rows": 300,
                "auc": 0.9 - 0.1 * i,
            }
            cells.append(
                {
                    "name": f"hessian_mode={mode},projection_dim_factor={factor}",
                    "settings": {"hessian_mode": mode, "projection_dim_factor": factor},
                    "status": "done" if done else "failed",
                    "error": None if done else "out of <b>memory</b>",
                    **{column["key"]: numbers.get(column["key"]) if done else None for column in COLUMNS},
                }
            )
    names = [cell["name"] for cell in cells[:3]]
    return {
        "format_version": 1, "name": "demo", "recipe": "demo", "overrides": [], "checkpoint": None,
        "rollout": {"prompts": 4, "responses": 16, "tokens": 300, "groups_mixed": 3, "accepted": 5, "rejected": 7},
        "sweep": {"hessian_mode": list(MODES), "projection_dim_factor": list(FACTORS)},
        "baseline": {"time_s": 0.5, "peak_bytes": 2**20},
        "columns": COLUMNS, "cells": cells,
        "agreement": {"measure": "spearman", "score": "influence_position", "names": names,
                      "matrix": [[1.0, 0.8, -0.5], [0.8, 1.0, 0.1], [-0.5, 0.1, 1.0]]},
        "machine": "a machine", "versions": {},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ablations" / "demo"
    path.mkdir(parents=True)
    (path / "ablation.json").write_text(json.dumps(table()))
    return path


@pytest.fixture
def ablation(browser: Browser, folder: Path) -> Any:
    with serving([folder]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        yield watched
        watched.page.close()
        assert watched.errors == [] and watched.foreign_requests == []


def numbers(page: Page) -> list[str]:
    return page.locator(".ablation-table tbody td:first-child").all_text_contents()


def test_an_ablation_opens_by_itself_and_shows_every_cell(ablation: Watched) -> None:
    page = ablation.open("")
    expect(page.locator("h1")).to_have_text("Ablation demo")
    expect(page.locator(".ablation-table tbody tr")).to_have_count(4)
    expect(page.locator(".tab")).to_have_text(["Ablation"])
    failed = page.locator(".ablation-table tbody tr").nth(3)
    expect(failed).to_contain_text("failed: out of <b>memory</b>")
    expect(page.locator("td.best", has_text="0.600 s")).to_have_count(1)
    expect(page.locator(".fact").first).to_contain_text("3 of 4")


def test_rows_are_sorted_and_the_choice_stays(ablation: Watched) -> None:
    page = ablation.open("")
    page.get_by_role("button", name="time").click()
    assert numbers(page) == ["2", "1", "3", "4"]  # what has no time comes last
    page.get_by_role("button", name="time").click()
    assert numbers(page) == ["3", "1", "2", "4"]
    page.reload()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("time")
    assert numbers(page) == ["3", "1", "2", "4"]


def test_the_matrix_has_the_colours_of_its_values_and_follows_the_selection(ablation: Watched) -> None:
    page = ablation.open("")
    cells = page.locator(".matrix tbody td")
    expect(cells).to_have_count(9)
    assert "p5" in (cells.nth(0).get_attribute("class") or "")
    assert "n3" in (cells.nth(2).get_attribute("class") or "")
    cells.nth(5).hover()
    expect(page.locator(".pair")).to_contain_text("against")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator(".matrix tr.chosen th")).to_have_text("2")
    assert "sel=1" in str(page.evaluate("location.hash"))
    page.reload()
    expect(page.locator("tr.current td").first).to_have_text("2")


def test_a_new_cell_appears_without_a_reload(ablation: Watched, folder: Path) -> None:
    page = ablation.open("")
    expect(page.locator(".ablation-table tbody tr")).to_have_count(4)
    changed = table()
    changed["cells"] = changed["cells"][:2]
    (folder / "ablation.json").write_text(json.dumps(changed))
    expect(page.locator(".ablation-table tbody tr")).to_have_count(2, timeout=30_000)


def test_a_report_of_an_ablation_is_one_file(browser: Browser, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    output.write_text(make_report([folder]).page, encoding="utf-8")
    page = browser.new_page()
    page.goto(output.as_uri())
    expect(page.locator(".matrix tbody td")).to_have_count(9)
    page.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("cells"), "has no cells"),
        (lambda t: t["agreement"].update(matrix=[[1.0]]), "no square table"),
        (lambda t: t.update(columns=[1]), "must be objects"),
    ],
)
def test_a_strange_table_is_refused_in_words(folder: Path, change: Any, words: str) -> None:
    strange = table()
    change(strange)
    (folder / "ablation.json").write_text(json.dumps(strange))
    with pytest.raises(AblationUnreadableError, match=words):
        ablation_payload(folder)
    with serving([folder]) as address, httpx.Client() as client:
        answer = client.get(f"{address}/api/runs/0/ablation")
        assert answer.status_code == 422 and words in answer.json()["error"]


def test_a_table_that_links_out_of_its_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(json.dumps(table()))
    (folder / "ablation.json").unlink()
    (folder / "ablation.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(AblationUnreadableError, match="refused"):
        ablation_payload(folder.resolve())
