"""Options of a server's appearance: model names, a proxy's root path, pages of other origins."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

ANY = "*"


@dataclass(frozen=True)
class CrossOrigin:
    """Requests that pages of other origins may send (CORS).

    :param origins: such as ``https://chat.example``; ``*`` allows any, none turns CORS off.
    :param methods: allowed methods; ``*`` allows any.  The same for ``headers``.
    :param credentials: whether browsers may send cookies and other credentials.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    credentials: bool = False


@dataclass(frozen=True)
class FaceOptions:
    """Options of a server's appearance to clients, browsers and proxies.

    :param served_names: names of the first model; the first of them is in ``/v1/models`` and in
        metrics.  Without any, the model has its own name.
    :param root_path: path of this server in a proxy, such as ``/llm``; "" for none.
    :param hides_docs: whether ``/docs`` and ``/openapi.json`` are not served.
    :param tells_tokenizer: whether ``/tokenizer_info`` shows the tokenizer's settings.
    """

    served_names: tuple[str, ...] = ()
    root_path: str = ""
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    tells_tokenizer: bool = False
    hides_docs: bool = False


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
