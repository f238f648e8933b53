"""Reports as one HTML file: pictures and tables, without script and without anything to fetch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gradtrace.commands.pages.picture import FONT, escape
from gradtrace.errors import GradtraceError
from gradtrace.trace.files import atomic_write

_STYLE = f"""
:root {{ color-scheme: light dark; --bg: #fdfdfb; --ink: #16181d; --dim: #63686f; --line: #e2e2dd; }}
@media (prefers-color-scheme: dark) {{ :root {{ --bg: #131518; --ink: #e9eaec; --dim: #8a9099; --line: #2a2e34; }} }}
body {{ margin: 0 auto; padding: 24px; max-width: 1200px; background: var(--bg); color: var(--ink);
  font: 14px/1.5 {FONT}; font-variant-numeric: tabular-nums; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }}
p {{ margin: 4px 0; color: var(--dim); max-width: 90ch; }}
.verdict {{ font-size: 16px; color: var(--ink); }}
section {{ margin: 28px 0; }}
svg {{ max-width: 100%; height: auto; display: block; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 8px 0; }}
th, td {{ text-align: left; padding: 3px 20px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th {{ color: var(--dim); font-weight: 500; }}
.marked td {{ font-weight: bold; }}
.numbers :is(th, td):not(:first-child) {{ text-align: right; }}
.last-wide td:last-child {{ white-space: normal; color: var(--dim); font-size: 12.5px; }}
"""


def html_page(title: str, *parts: str) -> str:
    """A document of these pieces of HTML, below its title."""
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="content-security-policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers", marked: str = "") -> str:
    """`kind`: how its columns are set, see the style above. `marked`: the first cell of the row that stands out."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr{' class=marked' if row[0] == marked else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    table = f'<table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def write_page(path: Path, content: str | bytes) -> None:
    """Write a file that a user named, complete or not at all."""
    try:
        atomic_write(path, content.encode("utf-8", "replace") if isinstance(content, str) else content)
    except OSError as error:
        raise GradtraceError(f"cannot write {path}: {error.strerror}") from error


def write_report(folder: Path, record: str, page: str, **pictures: str) -> None:
    """Write report.json, report.html and the pictures, each under its name, into the folder of a command's results."""
    atomic_write(folder / "report.json", record.encode())
    for name, picture in pictures.items():
        atomic_write(folder / f"{name}.svg", picture.encode())
    atomic_write(folder / "report.html", page.encode())
