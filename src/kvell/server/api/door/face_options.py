"""How a server shows itself: names, the path under which a proxy has it, pages of other origins."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

ANY = "*"


@dataclass(frozen=True)
class CrossOrigin:
    """Which pages of other origins may ask, and how (CORS).

    :param origins: such as ``https://chat.example``; ``*`` is any, none turns CORS off.
    :param methods: that they may use; ``*`` is any.  ``headers`` likewise.
    :param credentials: whether browsers may send cookies and the like.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    credentials: bool = False


@dataclass(frozen=True)
class FaceOptions:
    """How the server shows itself.

    :param served_names: the first model's names; the first of them is in ``/v1/models`` and in
        metrics.  Without any it has its own.
    :param root_path: under which a proxy has this server, such as ``/llm``; "" for none.
    :param cross_origin: which pages of other origins may ask.
    :param tells_tokenizer: whether ``/tokenizer_info`` shows the tokenizer's settings.
    """

    served_names: tuple[str, ...] = ()
    root_path: str = ""
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    tells_tokenizer: bool = False


def checked_root_path(root_path: str) -> str:
    """The path under which a proxy has this server, without a slash at its end.

    :raises ChangeSomething: if it is no path.
    """
    if root_path and (not root_path.startswith("/") or root_path.startswith("//")):
        raise ChangeSomething("root_path", root_path, "is no path", "give one such as /llm")
    return root_path.rstrip("/")


def listed(name: str, given: Sequence[str]) -> tuple[str, ...]:
    """Values that are given one by one, or as vLLM takes them, in a JSON list.

    :param name: of what they are, for errors.
    :raises ChangeSomething: if a list cannot be read.
    """
    found: list[str] = []
    for one in given:
        if not one.startswith("["):
            found.append(one)
            continue
        try:
            values = decode_json(one)
        except MalformedError:
            values = [None]
        if not all(isinstance(value, str) for value in values):
            remedy = """give one at a time, or a list such as '["*"]'"""
            raise ChangeSomething(name, one, "is not a JSON list of strings", remedy)
        found += values
    return tuple(found)


def checked_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers send them.

    :raises ChangeSomething: naming ``allowed_origins``, if one can be no browser's.
    """
    origins = listed("allowed_origins", given)
    for one in origins:
        scheme, mark, host = one.partition("://")
        if one != ANY and one != "null" and (not mark or not scheme or not host or "/" in host):
            remedy = f"give a scheme and a host, such as https://chat.example, or {ANY}"
            raise ChangeSomething("allowed_origins", one, "is no origin", remedy)
    return origins
