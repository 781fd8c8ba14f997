"""The page of the memory map: one document of HTML, styles and scripts, and its headers."""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources

SCRIPTS = tuple(
    (
        "text.js columns.js colours.js cells.js legend.js history.js timelines.js tables.js "
        "loans.js server.js asking.js instance.js map.js"
    ).split()
)
"""The scripts, in the order of their dependencies."""
STYLE_PLACE, SCRIPT_PLACE = "/*STYLE*/", "/*SCRIPT*/"


@dataclass(frozen=True)
class Page:
    """A document, and headers with its content security policy."""

    html: bytes
    headers: dict[str, str]


def make_page() -> Page:
    """Join the files of the folder ``static`` into one document.

    The policy allows only the document's own styles and scripts, by their digests, and requests to
    the same origin.
    """
    style = static_text("map.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(static_text, SCRIPTS)) + "})();\n"
    html = static_text("map.html").replace(STYLE_PLACE, style).replace(SCRIPT_PLACE, script)
    return Page(html.encode(), policy_headers(style, script))


def policy_headers(style: str, script: str = "") -> dict[str, str]:
    """Return the headers of a document that may use only its own style and script.

    :param script: "" for none; with a script, requests to the same origin are allowed.
    """
    scripts = [f"script-src {_digest(script)}", "connect-src 'self'"] if script else []
    policy = [
        "default-src 'none'",
        f"style-src {_digest(style)}",
        *scripts,
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def static_text(name: str) -> str:
    return resources.files("kvell.server.map").joinpath("static", name).read_text("utf-8")


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
