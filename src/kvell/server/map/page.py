"""The page itself: its HTML, styles and scripts put into one document, and the headers it needs."""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources

SCRIPTS = (
    *("text.js", "columns.js", "colours.js", "cells.js", "timelines.js", "tables.js"),
    *("asking.js", "instance.js", "map.js"),
)
"""In the order in which they build on each other."""
STYLE_PLACE, SCRIPT_PLACE = "/*STYLE*/", "/*SCRIPT*/"


@dataclass(frozen=True)
class Page:
    """A document, and the headers under which it may do no more than it needs."""

    html: bytes
    headers: dict[str, str]


def make_page() -> Page:
    """Put the files beside this module together.

    Styles and scripts stand in the document, so that it is one answer; the policy names their
    digests and allows no others.  All it may fetch is from where it came from.
    """
    style = _text("map.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_text(name) for name in SCRIPTS) + "})();\n"
    html = _text("map.html").replace(STYLE_PLACE, style).replace(SCRIPT_PLACE, script)
    policy = [
        "default-src 'none'",
        f"style-src {_digest(style)}",
        f"script-src {_digest(script)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html.encode(), headers)


def _text(name: str) -> str:
    return resources.files("kvell.server.map").joinpath(name).read_text("utf-8")


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
