"""API keys as digests, and the ring that looks up the key of a request."""

import hashlib
import hmac
from collections.abc import Iterator, Sequence

from kvell.server.access.accounts import Account, ApiKey

OPERATOR = "operator"
"""The tenant of the key of ``--api-key``."""


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def operator_key(key: str) -> ApiKey:
    return ApiKey(OPERATOR, digest_of(key.encode()), is_operator=True)


class KeyRing:
    """All keys of a server, each with its account; a ring without keys admits all requests.

    :ivar is_empty: whether there is no key.
    """

    def __init__(self, keys: Sequence[ApiKey], now_seconds: float) -> None:
        self._accounts: tuple[Account, ...] = ()
        self.replace(keys, now_seconds)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts)

    def __len__(self) -> int:
        return len(self._accounts)

    def replace(self, keys: Sequence[ApiKey], now_seconds: float) -> None:
        """Replace the keys; an unchanged key keeps its account."""
        before = {account.key: account for account in self._accounts}
        self._accounts = tuple(before.get(key) or Account(key, now_seconds) for key in keys)
        self.is_empty = not self._accounts

    def find(self, key: bytes) -> Account | None:
        """Return the account of a key.

        The key is compared with every stored key, so the time does not depend on the match.
        """
        digest = digest_of(key)
        match = None
        for account in self._accounts:
            if hmac.compare_digest(digest, account.key.digest):
                match = account
        return match
