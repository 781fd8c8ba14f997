"""A client of a server's operator routes, with one request at a time.

It uses the standard library; only ``kvell bench serve`` needs a client for concurrent streams.

It reads the body of ``GET /cluster``.  Further fields are left out of tables, and shown by
``--json``.
"""

import http.client
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from kvell.errors import ChangeSomething, KvellError, TryLater
from kvell.load.answers import error_text
from kvell.wire.decoding import MalformedError, decode


@dataclass(frozen=True)
class Pages:
    """The KV memory of an instance."""

    large_pages: int
    empty_large_pages: int
    free_bytes: int


@dataclass(frozen=True)
class LentSections:
    """The numbers of sections of KV cache that an instance lends and borrows."""

    lent: int = 0
    borrowed: int = 0


@dataclass(frozen=True)
class Instance:
    """One instance.

    :param pid: None while there is no process.
    :param role: role at its start; ``serves_as`` is the current one.
    :param host: address of its machine; "" is the front's.
    """

    id: str
    pid: int | None
    role: str
    state: str
    restarts: int
    in_flight: int
    outstanding_prompt_tokens: int
    outstanding_output_tokens: int
    pages: Pages
    contract_bytes: int
    host: str = ""
    serves_as: str = ""
    sections: LentSections = LentSections()


@dataclass(frozen=True)
class FrontState:
    """The state of the front."""

    pid: int
    waiting: int


@dataclass(frozen=True)
class Cluster:
    """All instances of a server."""

    routing: str
    front: FrontState
    instances: tuple[Instance, ...]
    contract_bytes: int


@dataclass(frozen=True)
class ClusterAnswer:
    """A server's answer, decoded and raw."""

    cluster: Cluster
    raw: Mapping[str, Any]


_CLUSTER = msgspec.json.Decoder(Cluster)
_FIELDS = msgspec.json.Decoder(dict[str, Any])

ANSWER_SECONDS = 10.0
"""The time limit of each answer; the server answers all requests immediately."""
_FOREIGN_HOST = b'"foreign_host"'
"""The code of an error about the name in the URL."""
_FAULTS = (OSError, http.client.HTTPException, ValueError)
"""Errors of connections and certificates, of answers that are not HTTP, and of host names."""


class ClusterClient:
    """A client of one server's operator routes.

    :param url: with or without ``/v1`` at its end.
    :raises ChangeSomething: if the URL is invalid, or the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._key = url, api_key
        self._secure, self._host, self._port, self._prefix = _parts(url)
        if api_key is not None and not api_key.isprintable():
            raise ChangeSomething("--api-key", "…", "cannot be sent", "give the server's key")

    def status(self) -> ClusterAnswer:
        """Return the state of all instances.

        :raises ChangeSomething: if the server does not answer, refuses the key, or is not Kvell.
        """
        return self._read(*self._asked("GET", "/cluster"))

    def pages(self) -> bytes:
        """Return the data of the memory map as JSON text.

        :raises ChangeSomething: as :meth:`status` does.
        """
        status, body = self._asked("GET", "/debug/pages")
        self._check(status, body)
        return body

    def scale(self, counts: Mapping[str, int]) -> ClusterAnswer:
        """Start scaling each role to the given number of instances; return the state after that.

        :raises ChangeSomething: as :meth:`status` does.
        :raises click.ClickException: if the server refuses, with its reason.
        """
        return self._read(*self._asked("POST", "/cluster/scale", {"instances": dict(counts)}))

    def drain(self, instance_id: str) -> ClusterAnswer:
        """Start draining an instance; return the state after that.

        :raises ChangeSomething: as :meth:`status` does.
        :raises click.ClickException: if the server refuses, with its reason.
        """
        return self._read(*self._asked("POST", "/cluster/drain", {"id": instance_id}))

    def _asked(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        headers: dict[str, str | bytes] = {"Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}".encode()
        content = None
        if body is not None:
            content = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, self._prefix + path, content, headers)
            response = connection.getresponse()
            status = response.status
            answer = response.read()
        except _FAULTS as error:
            problem = f"does not answer ({_reason(error)})"
            remedy = "start the server, or give its address"
            raise ChangeSomething("--url", self._url, problem, remedy) from error
        finally:
            connection.close()
        if status == 404 and method == "GET":
            raise self._not_ours()
        return status, answer

    def _check(self, status: int, body: bytes) -> None:
        if status == 403 and _FOREIGN_HOST in body:
            problem = f"is refused (HTTP {status}: {error_text(body)})"
            raise ChangeSomething("--url", self._url, problem, "give the server's IP address")
        if status in (401, 403):
            problem = "is needed" if self._key is None else "is not accepted"
            problem += f" (HTTP {status}: {error_text(body)})"
            raise ChangeSomething("--api-key", "…", problem, "give the server's key")
        if status in (429, 503):
            raise TryLater(f"{self._url} cannot do it now: {error_text(body)}")
        if status >= 500:
            raise KvellError(f"{self._url} failed (HTTP {status}: {error_text(body)})")
        if status >= 400:
            raise click.ClickException(error_text(body))

    def _read(self, status: int, body: bytes) -> ClusterAnswer:
        self._check(status, body)
        try:
            return ClusterAnswer(decode(_CLUSTER, body), decode(_FIELDS, body))
        except MalformedError as error:
            raise self._not_ours() from error

    def _not_ours(self) -> ChangeSomething:
        problem = "does not say which instances it has"
        return ChangeSomething("--url", self._url, problem, "give the address of `kvell serve`")


def _parts(url: str) -> tuple[bool, str, int, str]:
    """Return whether a URL is HTTPS, its host and port, and the prefix of paths."""
    remedy = "use one like http://127.0.0.1:8000"
    problem = ChangeSomething("--url", url, "is not an address of a server", remedy)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise problem from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise problem
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return secure, parts.hostname, port or (443 if secure else 80), prefix


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_SECONDS:g} s"
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error) or type(error).__name__
