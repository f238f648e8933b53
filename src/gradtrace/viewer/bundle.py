"""The viewer's pages as one HTML file: our ES modules in one inline script, the style sheets in one style element.

Every module becomes a function of its own that returns what it exports, in the order of their imports, so private
names stay private. Our modules use named imports and exports only; anything else is an error here.
"""

from __future__ import annotations

import base64
import hashlib
import html
import posixpath
import re
from collections.abc import Mapping

from gradtrace.viewer.server import static_files

_IMPORT = re.compile(r'^import \{\s*(?P<names>[^}]+?)\s*\} from "(?P<path>[^"]+)";$', re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (?P<name>\w+)", re.M)
STYLE_SHEETS = ("css/theme.css", "css/base.css", "css/group.css", "css/pages.css", "css/scores.css")


def bundle_script(files: Mapping[str, bytes], entry: str = "js/main.js") -> str:
    """One script that does what loading `entry` would do."""
    order: list[str] = []
    _visit(files, entry, order, ())
    exported: dict[str, str] = {}
    parts = []
    for path in order:
        source = files[path].decode()
        names = [match["name"] for match in _EXPORT.finditer(source)]
        for name in names:
            if name in exported:
                raise ValueError(f"{path} and {exported[name]} both export {name}: a bundle has one name space")
            exported[name] = path
        body = re.sub(r"^export ", "", _IMPORT.sub("", source), flags=re.M)
        if re.search(r"^(import|export)\b", body, re.M):
            raise ValueError(f"{path} has an import or export that the bundler does not know")
        result = f"return {{ {', '.join(names)} }};\n" if names else ""
        head = f"const {{ {', '.join(names)} }} = " if names else ""
        parts.append(f"// {path}\n{head}(() => {{\n{body}{result}}})();\n")
    return "\n".join(parts)


def _visit(files: Mapping[str, bytes], path: str, order: list[str], open_paths: tuple[str, ...]) -> None:
    if path in order:
        return
    if path in open_paths:
        raise ValueError(f"modules import one another in a circle: {' → '.join((*open_paths, path))}")
    for match in _IMPORT.finditer(files[path].decode()):
        imported = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
        _visit(files, imported, order, (*open_paths, path))
    order.append(path)


def single_page(data: bytes, title: str) -> str:
    """An HTML page that holds `data` (JSON) and needs nothing else. Its policy allows exactly its own script."""
    files = static_files()
    script = bundle_script(files)
    style = "\n".join(files[name].decode() for name in STYLE_SHEETS)
    if "</script" in script or "</style" in style:
        raise ValueError("a closing tag inside a script or style would end it early")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    # "<" cannot occur in the data, so no run name or token can close the element that holds it.
    safe_data = data.decode("utf-8", "replace").replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="content-security-policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<script type="application/json" id="gradtrace-report">{safe_data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
