"""llms.txt, which the documentation's build writes: every page of the navigation with its first sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

HOOK = Path(__file__).parent.parent / "docs" / "_hooks" / "generated.py"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", HOOK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("markdown", "sentence"),
    [
        ("# Title\n\n```\ncode\n```\n\nSee [this page](a.md), it helps. More.", "See this page, it helps."),
        ("# Title\n\n| a |\n|---|\n\n- **One.** Two.", "**One.** Two."),
        ("# Title\n## Part\nOne thing: it is so. More.", "One thing: it is so."),
        ('--8<-- "CONTRIBUTING.md"\n', ""),
        ("# Only a title", ""),
    ],
)
def test_a_page_is_told_by_its_first_sentence(hook: ModuleType, markdown: str, sentence: str) -> None:
    assert hook.first_sentence(markdown) == sentence


def test_every_page_of_the_navigation_is_listed_under_its_section(hook: ModuleType, tmp_path: Path) -> None:
    pages = [SimpleNamespace(title=t, url=f"{t}/", markdown=f"# {t}\n\nAbout {t}.") for t in ("home", "knobs")]
    home = SimpleNamespace(is_section=False, **vars(pages[0]))
    section = SimpleNamespace(is_section=True, title="Reference", children=[pages[1]])
    hook.on_nav(SimpleNamespace(items=[home, section]), None, None)
    hook.on_post_build(SimpleNamespace(site_dir=str(tmp_path), site_name="ours", site_description="what it is"))
    text = (tmp_path / "llms.txt").read_text()
    assert text.startswith("# ours\n\n> what it is\n") and "- [home](home/): About home." in text
    assert text.index("## Reference") < text.index("- [knobs](knobs/): About knobs.")
