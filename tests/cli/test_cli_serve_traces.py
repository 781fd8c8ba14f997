"""``kvell serve --otlp-traces-endpoint``: it arrives, or one line says what is wrong with it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.server.text.served_text import ServedText

Kvell = Callable[..., Any]
FLAG, URL = "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    options: list[Any] = []
    monkeypatch.setattr("kvell.server.run.serve", lambda _c, _t, given, *_: options.append(given))
    monkeypatch.setattr(ServedText, "load", lambda name, path, *_: f"text of {name} in {path}")
    monkeypatch.setattr(
        "kvell.models.sources.source.resolve_model", lambda model, *_: Path(f"where {model} is")
    )
    return options


def test_the_address_arrives(kvell: Kvell, served: list[Any]) -> None:
    assert kvell("serve", FLAG, URL).code == 0
    assert kvell("serve").code == 0
    assert [options.otlp_traces_endpoint for options in served] == [URL, None]


def test_what_is_no_address_starts_nothing(kvell: Kvell, served: list[Any]) -> None:
    ended = kvell("serve", FLAG, "localhost:4317")
    assert (ended.code, served) == (2, [])
    assert ended.stderr.splitlines()[-1] == (
        f"kvell: {FLAG}=localhost:4317: is not an address of a collector; use one like {URL}"
    )


def test_without_the_extra_the_flag_says_how_to_install_it(
    kvell: Kvell, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvell.server.tracing.exporting", raising=False)
    monkeypatch.delattr("kvell.server.tracing.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    ended = kvell("serve", FLAG, URL)
    assert (ended.code, served) == (2, [])
    assert ended.stderr.startswith(f"kvell: {FLAG}={URL}: needs packages")
    assert ended.stderr.endswith("; pip install 'kvell[otel]'\n")
