"""Options of a server's appearance: model names, a proxy's root path, pages of other origins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvell.errors import ChangeSomething
from kvell.flags import setting
from kvell.wire.decoding import MalformedError, decode_json

ANY = "*"
_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)


def checked_root_path(root_path: str) -> str:
    """Return the root path without a slash at its end.

    :raises ChangeSomething: if ``root_path`` is not a path.
    """
    if root_path and (not root_path.startswith("/") or root_path.startswith("//")):
        raise ChangeSomething("root_path", root_path, "is not a path", "give one such as /llm")
    return root_path.rstrip("/")


def parse_list(name: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return values that are given one by one or, as in vLLM, in a JSON list.

    :param name: name of the option, for errors.
    :raises ChangeSomething: if a list cannot be read.
    """
    read: list[str] = []
    for text in given:
        if not text.startswith("["):
            read.append(text)
            continue
        try:
            values = decode_json(text)
        except MalformedError:
            values = [None]
        if not all(isinstance(value, str) for value in values):
            remedy = """give one at a time, or a list such as '["*"]'"""
            raise ChangeSomething(name, text, "is not a JSON list of strings", remedy)
        read += values
    return tuple(read)


def checked_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Return the given origins, checked to have the form that browsers send.

    :raises ChangeSomething: naming ``allowed_origins``, if one has another form.
    """
    origins = parse_list("allowed_origins", given)
    for url in origins:
        scheme, mark, host = url.partition("://")
        if url != ANY and url != "null" and (not mark or not scheme or not host or "/" in host):
            remedy = f"give a scheme and a host, such as https://chat.example, or {ANY}"
            raise ChangeSomething("allowed_origins", url, "is not an origin", remedy)
    return origins


def checked_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """Return the given host names, checked to have neither a scheme nor a port.

    :raises ChangeSomething: naming ``allowed_hosts``, if one has.
    """
    hosts = parse_list("allowed_hosts", given)
    for host in hosts:
        if host != ANY and not _HOST.fullmatch(host):
            remedy = f"give a name without scheme and port, such as kvell.example, or {ANY}"
            raise ChangeSomething("allowed_hosts", host, "is not a host name", remedy)
    return hosts


@dataclass(frozen=True)
class CrossOrigin:
    """Requests that pages of other origins may send (CORS); without origins, CORS is off."""

    origins: tuple[str, ...] = setting(
        (),
        "--allowed-origins",
        "Web pages of these origins may send requests, such as https://chat.example "
        "(* is any); give it several times, or a JSON list. [default: none]",
        "list",
        parse=checked_origins,
    )
    methods: tuple[str, ...] = setting(
        (ANY,),
        "--allowed-methods",
        "Methods that pages of other origins may use. [default: any]",
        "list",
        parse=partial(parse_list, "allowed_methods"),
    )
    headers: tuple[str, ...] = setting(
        (ANY,),
        "--allowed-headers",
        "Headers that pages of other origins may send. [default: any]",
        "list",
        parse=partial(parse_list, "allowed_headers"),
    )
    credentials: bool = setting(
        False,
        "--allow-credentials",
        "Let browsers send credentials from other origins.",
        "mark",
    )


@dataclass(frozen=True)
class FaceOptions:
    """Options of a server's appearance to clients, browsers and proxies.

    :param served_names: the first of them is in ``/v1/models`` and in metrics.
    """

    served_names: tuple[str, ...] = setting(
        (),
        "--served-model-name",
        "Name of the first model in requests; give it several times for several."
        " [default: as --model says]",
        "list",
        parse=partial(parse_list, "served_model_name"),
    )
    root_path: str = setting(
        "",
        "--root-path",
        "Path at which a proxy serves this server, such as /llm. [default: none]",
        metavar="PATH",
        parse=checked_root_path,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "--allowed-hosts",
        "Without API keys, serve these host names too (* is any, *.NAME all below a name)."
        " [default: localhost, IP addresses and --host]",
        "list",
        parse=checked_hosts,
    )
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    tells_tokenizer: bool = setting(
        False,
        "--enable-tokenizer-info-endpoint",
        "Show the tokenizer's settings and the chat template at /tokenizer_info.",
        "mark",
    )
    hides_docs: bool = setting(
        False, "--disable-docs", "Serve neither /docs nor /openapi.json.", "mark"
    )
