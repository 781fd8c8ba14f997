"""API keys as digests, and the ring that finds the one which a client sent."""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvell.server.access.accounts import Account

OPERATOR = "operator"
"""The tenant of a key that was given alone (``--api-key``)."""


@dataclass(frozen=True)
class ApiKey:
    """A key that clients may send.

    :param tenant: whose it is; keys of one tenant share cached prefixes.
    :param digest: SHA-256 of the key; the key itself is not kept.
    :param requests_per_minute: None is without limit.
    :param tokens_per_minute: of prompts and outputs together; None is without limit.
    :param is_operator: whether it may see and change the server itself.
    :param max_in_flight: sequences that may wait or run at once; None is without limit.
    :param min_priority: the lowest, which is served first; None is without limit.
    """

    tenant: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    is_operator: bool = False
    max_in_flight: int | None = None
    min_priority: int | None = None


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def operator_key(key: str) -> ApiKey:
    """A key that may do everything."""
    return ApiKey(OPERATOR, digest_of(key.encode()), is_operator=True)


@dataclass(frozen=True)
class Holder:
    """A key and what it has used."""

    key: ApiKey
    account: Account


class KeyRing:
    """All keys of a server, each with its account.

    :param keys: an empty ring lets everybody in.
    """

    def __init__(self, keys: Sequence[ApiKey], now_seconds: float) -> None:
        self._holders: tuple[Holder, ...] = ()
        self.replace(keys, now_seconds)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys."""
        return not self._holders

    def replace(self, keys: Sequence[ApiKey], now_seconds: float) -> None:
        """Take other keys; those that stay as they were keep what they have used."""
        before = {holder.key: holder for holder in self._holders}
        self._holders = tuple(before.get(key) or _holder(key, now_seconds) for key in keys)

    def find(self, key: bytes) -> Holder | None:
        """The holder of a key.

        Every key is compared, whichever is right, so the time tells nothing about them.
        """
        digest, found = digest_of(key), None
        for holder in self._holders:
            if hmac.compare_digest(digest, holder.key.digest):
                found = holder
        return found


def _holder(key: ApiKey, now_seconds: float) -> Holder:
    account = Account(
        key.requests_per_minute,
        key.tokens_per_minute,
        now_seconds,
        max_in_flight=key.max_in_flight,
        min_priority=key.min_priority,
    )
    return Holder(key, account)
