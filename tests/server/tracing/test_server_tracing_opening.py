"""``--otlp-traces-endpoint``: addresses, packages that are missing, and a server without it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvell.errors import ChangeSomething
from kvell.server.run import ServeOptions, Texts, serve
from kvell.server.tracing.opening import checked_endpoint, traces_to
from kvell.testing.instance import ByteText

URL = "http://127.0.0.1:4318/v1/traces"
SERVER = Path(__file__).with_name("traced_server.py")


@pytest.fixture(params=["opentelemetry.sdk", "opentelemetry.exporter"])
def without_packages(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """As if an extra's package had never been installed."""
    missing: str = request.param
    forgotten = (missing, "kvell.server.tracing.exporting")
    for name in [name for name in sys.modules if name.startswith(forgotten)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delattr("kvell.server.tracing.exporting", raising=False)
    yield missing


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        (URL, URL),
        ("http://127.0.0.1:4318", URL),
        ("http://127.0.0.1:4318/", URL),
        ("https://otel.example.org/api/otlp?x=1", "https://otel.example.org/api/otlp?x=1"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_the_usual_one(endpoint: str, address: str) -> None:
    assert checked_endpoint(endpoint) == address


@pytest.mark.parametrize(
    "endpoint",
    ["", "localhost:4317", "grpc://localhost:4317", "http://", "http:///x", "http://x:99999", "["],
)
def test_what_is_no_address_is_refused_with_one_that_is(endpoint: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        traces_to(endpoint)
    error = caught.value
    assert (error.field, error.value) == ("--otlp-traces-endpoint", endpoint)
    assert URL in error.remedy


def test_missing_packages_are_named_with_the_flag_and_the_remedy(without_packages: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        checked_endpoint(URL)
    assert str(caught.value).startswith(f"--otlp-traces-endpoint={URL}: needs packages")
    assert without_packages in caught.value.problem
    assert caught.value.remedy == "pip install 'kvell[otel]'"


def test_missing_packages_are_said_before_anything_is_started(without_packages: str) -> None:
    options = ServeOptions(port=0, otlp_traces_endpoint=URL)
    with pytest.raises(ChangeSomething, match="needs packages"):
        serve(["false"], Texts.of(ByteText()), options)


def started(endpoint: str) -> list[str]:
    """What a running server has imported of tracing."""
    command = [sys.executable, str(SERVER), endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url, *imported = process.stdout.readline().split()
            assert httpx.get(f"{url}/health").status_code == 200
            return imported
        finally:
            process.terminate()
            assert process.wait(timeout=20) == 0


def test_a_server_without_the_flag_imports_nothing_of_it() -> None:
    assert started("-") == []
    assert {"kvell.server.tracing.exporting", "opentelemetry.sdk.trace"} <= set(started(URL))
