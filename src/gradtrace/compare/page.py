"""A comparison as one HTML file: pictures and tables, without script and without anything to fetch."""

from __future__ import annotations

from gradtrace.compare.comparison import Comparison
from gradtrace.compare.picture import FONT, escape
from gradtrace.compare.table import Cells, remarks_of, table_cells

_STYLE = f"""
:root {{ color-scheme: light dark; --bg: #fdfdfb; --ink: #16181d; --dim: #63686f; --line: #e2e2dd; }}
@media (prefers-color-scheme: dark) {{ :root {{ --bg: #131518; --ink: #e9eaec; --dim: #8a9099; --line: #2a2e34; }} }}
body {{ margin: 0 auto; padding: 24px; max-width: 1000px; background: var(--bg); color: var(--ink);
  font: 14px/1.5 {FONT}; font-variant-numeric: tabular-nums; }}
h1 {{ font-size: 20px; margin: 0 0 4px; }}
p {{ margin: 4px 0; color: var(--dim); max-width: 90ch; }}
section {{ margin: 28px 0; }}
svg {{ max-width: 100%; height: auto; display: block; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 8px 0; }}
th, td {{ text-align: left; padding: 3px 20px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th {{ color: var(--dim); font-weight: 500; }}
td.wide {{ white-space: normal; color: var(--dim); font-size: 12.5px; }}
"""


def comparison_page(comparisons: list[Comparison], title: str) -> str:
    sections = "\n".join(_section(comparison) for comparison in comparisons)
    remarks = "".join(f"<p>{escape(remark)}</p>" for remark in remarks_of(comparisons))
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
{remarks}
{sections}
</body>
</html>
"""


def _section(comparison: Comparison) -> str:
    cells = table_cells(comparison)
    return f"""<section>
{comparison.picture()}<div class="scroll">{_table(cells)}</div>
<p>{escape(cells.caption)}</p>
</section>"""


def _table(cells: Cells) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in cells.head)
    last = len(cells.head) - 1
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=wide' if index == last else ''}>{escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in cells.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
