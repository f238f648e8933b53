"""Components of the site that are made from the code, so that they cannot go stale.

`<!-- generated: knobs -->` becomes one table per configuration class, from the fields and the docstrings under them;
`columns` the columns of step files, `meta` the keys of their meta_json, `commands` each command's `--help`. Beside the
pages stand the report of a real run and `llms.txt` (llmstxt.org): every page of the navigation with its first sentence,
for programs that read.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import tempfile
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from gradtrace import cli
from gradtrace.commands.report import make_report
from gradtrace.commands.view import unpack_demo
from gradtrace.config.root import Config
from gradtrace.trace.columns import COLUMNS, KINDS


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATORS[found.group(1)](), markdown)


def on_files(files: Any, config: Any) -> Any:
    """The report of the recorded demo run, as `gradtrace report` writes it: a page to click in."""
    with tempfile.TemporaryDirectory() as folder:
        page = make_report(unpack_demo(Path(folder))[:1]).page
    files.append(File.generated(config, "demo_report.html", content=page))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """Remember the navigation's sections; their pages have no text yet."""
    SECTIONS.clear()
    for item in nav.items:
        pages = item.children if item.is_section else [item]
        SECTIONS.setdefault(item.title if item.is_section else "", []).extend(pages)


def on_post_build(config: Any) -> None:
    (Path(config.site_dir) / "llms.txt").write_text(llms_text(config.site_name, config.site_description))


SECTIONS: dict[str, list[Any]] = {}
"""Section of the navigation → its pages."""


def llms_text(name: str, description: str) -> str:
    """The pages of the navigation, one line each, as llmstxt.org asks for it."""
    lines = [f"# {name}", "", f"> {description}", ""]
    for title, pages in SECTIONS.items():
        lines += [f"## {title or 'Start here, and more'}", ""]
        for page in pages:
            said = first_sentence(page.markdown)
            lines.append(f"- [{page.title}]({page.url or 'index.html'})" + (f": {said}" if said else ""))
        lines.append("")
    return "\n".join(lines)


def first_sentence(markdown: str) -> str:
    """Of the first paragraph that is text; links become their words."""
    without = re.sub(r"```.*?```|^(#|--8<--)[^\n]*", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", without):
        text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        if text and text[0] not in "|<!":
            return re.split(r"(?<=[.?!])\s", text.removeprefix("- "))[0].rstrip(":")
    return ""


def docstrings(cls: type) -> dict[str, str]:
    """{field: the string literal under it}, those of its bases included."""
    found = {
        name: text
        for base in cls.__bases__
        if dataclasses.is_dataclass(base)
        for name, text in docstrings(base).items()
    }
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                assert isinstance(statement.target, ast.Name)
                found[statement.target.id] = value.value
    return found


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[", "\\[")


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def tables(cls: type, prefix: str) -> list[str]:
    """A section for `cls`, then one for each of its nested classes."""
    texts, hints = docstrings(cls), typing.get_type_hints(cls)
    rows, nested = [], []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            nested += tables(hints[field.name], f"{prefix}{field.name}.")
            continue
        default = default_of(field)
        choices = field.metadata.get("choices")
        meaning = cell(texts.get(field.name) or field.metadata.get("meaning", ""))
        if choices:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
        shown = repr(default) if default != "" else "empty"
        rows.append(f"| `{prefix}{field.name}` | `{shown}` | {meaning} |")
    title = [f"### {prefix.rstrip('.') or 'top level'}", "", "| key | default | meaning |", "|---|---|---|"]
    return [*title, *rows, "", *nested] if rows else nested


def knobs() -> str:
    return "\n".join(tables(Config, ""))


def columns() -> str:
    lines = ["| column | level | type | meaning |", "|---|---|---|---|"]
    for name, column in COLUMNS.items():
        if column.derived is not None:  # no file has it
            continue
        meaning = cell(column.meaning) + (f" [{column.unit}]" if column.unit else "")
        lines.append(f"| `{name}` | {column.level} | {column.dtype} | {meaning} |")
    return "\n".join(lines)


def meta() -> str:
    lines = ["| file | key | meaning |", "|---|---|---|"]
    for name, record in KINDS.items():
        lines += [f"| `{name}` | `{key}` | {cell(meaning)} |" for key, meaning in record.meta.items()]
    return "\n".join(lines)


def commands() -> str:
    parts = []
    for name, (_, summary) in cli.COMMANDS.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.build_parser([name]).parse_args([name, "--help"])
        parts.append(f"## gradtrace {name}\n\n{summary}\n\n```text\n{text.getvalue()}```\n")
    return "\n".join(parts)


GENERATORS: dict[str, Callable[[], str]] = {
    "knobs": knobs,
    "columns": columns,
    "meta": meta,
    "commands": commands,
}
