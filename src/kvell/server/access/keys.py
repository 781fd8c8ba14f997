"""API keys as digests, and the ring that looks up the key of a request."""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvell.server.access.accounts import Account

OPERATOR = "operator"
"""The tenant of the key of ``--api-key``."""


@dataclass(frozen=True)
class ApiKey:
    """A key that clients may send.

    A limit that is None is unlimited.

    :param tenant: owner; keys of one tenant share cached prefixes.
    :param digest: SHA-256 of the key; the key itself is not stored.
    :param tokens_per_minute: limit of prompts and outputs together.
    :param is_operator: whether the key gives access to ``/cluster`` and ``/debug``.
    :param min_priority: lowest priority of requests; the lowest number is served first.
    """

    tenant: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    is_operator: bool = False
    max_in_flight: int | None = None
    min_priority: int | None = None


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def operator_key(key: str) -> ApiKey:
    return ApiKey(OPERATOR, digest_of(key.encode()), is_operator=True)


@dataclass(frozen=True)
class Holder:
    """A key and its account."""

    key: ApiKey
    account: Account


class KeyRing:
    """All keys of a server, each with its account; a ring without keys admits all requests.

    :ivar is_empty: whether there is no key.
    """

    def __init__(self, keys: Sequence[ApiKey], now_seconds: float) -> None:
        self._holders: tuple[Holder, ...] = ()
        self.replace(keys, now_seconds)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    def replace(self, keys: Sequence[ApiKey], now_seconds: float) -> None:
        """Replace the keys; an unchanged key keeps its account."""
        before = {holder.key: holder for holder in self._holders}
        self._holders = tuple(before.get(key) or _holder(key, now_seconds) for key in keys)
        self.is_empty = not self._holders

    def find(self, key: bytes) -> Holder | None:
        """Return the holder of a key.

        The key is compared with every stored key, so the time does not depend on the match.
        """
        digest = digest_of(key)
        match = None
        for holder in self._holders:
            if hmac.compare_digest(digest, holder.key.digest):
                match = holder
        return match


def _holder(key: ApiKey, now_seconds: float) -> Holder:
    account = Account(
        key.requests_per_minute,
        key.tokens_per_minute,
        now_seconds,
        max_in_flight=key.max_in_flight,
        min_priority=key.min_priority,
    )
    return Holder(key, account)
