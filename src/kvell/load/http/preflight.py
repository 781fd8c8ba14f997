"""Checks before a run that the server answers and serves the model."""

import msgspec

from kvell.errors import ChangeSomething
from kvell.load.answers import error_text
from kvell.load.http.wire import Client, ConnectionFailed
from kvell.wire.decoding import MalformedError, decode

MODELS = "/v1/models"
MOST_NAMES = 5


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_CARDS = msgspec.json.Decoder(_Cards)


async def served_model(client: Client, base_url: str, wanted: str | None) -> str:
    """Return the model name to request; a server that lists no models is not checked.

    :param wanted: None: the server's only model.
    :raises ChangeSomething: if the server does not answer, needs a key, or has no such model.
    """
    try:
        status, body = await client.get(MODELS)
    except ConnectionFailed as error:
        remedy = "start the server, or give its address"
        problem = f"does not answer: {error}"
        raise ChangeSomething("--base-url", base_url, problem, remedy) from error
    if status in (401, 403):
        problem = f"is not accepted (HTTP {status}: {error_text(body)})"
        raise ChangeSomething("--api-key", "…", problem, "give the server's key")
    return _chosen(_names(body) if status == 200 else [], base_url, wanted)


def _names(body: bytes) -> list[str]:
    try:
        return [card.id for card in decode(_CARDS, body).data]
    except MalformedError:
        return []


def _chosen(names: list[str], base_url: str, wanted: str | None) -> str:
    listed = " or ".join(names[:MOST_NAMES])
    if wanted is None:
        if len(names) == 1:
            return names[0]
        problem = f"cannot be guessed at {base_url}"
        raise ChangeSomething("--model", "", problem, f"give {listed or 'the name it serves'}")
    if names and wanted not in names:
        raise ChangeSomething("--model", wanted, f"is not served at {base_url}", f"use {listed}")
    return wanted
