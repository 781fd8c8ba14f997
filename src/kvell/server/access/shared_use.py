"""The use of keys at all fronts of a cluster, so that a key's limits hold for all fronts together.

::

    this front ── each key's use here (in a heartbeat) ──► manager
    this front ◄── each key's use at every other front (in the roster) ── manager

A report has totals, and this front counts the difference to the previous report.  So a roster may
be repeated or lost, and the manager may restart.  Another front may have counted before this front
has started: after its first report, a key has at most as much left here as there.
"""

import heapq
from collections.abc import Mapping

from kvell.clock import Clock
from kvell.fleet.manager.messages import MOST_KEYS_TOLD, NAME_DIGITS, KeyUse
from kvell.server.access.accounts import Account
from kvell.server.access.keys import KeyRing

MOST_FRONTS = 64
"""The number of fronts whose counts are kept: those in the most recent reports."""


class SharedUse:
    """The use of the keys of a server, here and at other fronts."""

    def __init__(self, keys: KeyRing, clock: Clock) -> None:
        self._keys, self._clock = keys, clock
        self._heard: dict[str, dict[str, KeyUse]] = {}

    def take(self) -> dict[str, KeyUse]:
        """Return the use of keys with limits: at most ``MOST_KEYS_TOLD``, those used most."""
        now = self._clock.now_seconds()
        uses = {_name(account): _use(account, now) for account in self._keys if account.has_limits}
        if len(uses) <= MOST_KEYS_TOLD:
            return uses
        return dict(heapq.nlargest(MOST_KEYS_TOLD, uses.items(), key=lambda item: _weight(item[1])))

    def on_uses(self, fronts: Mapping[str, Mapping[str, KeyUse]]) -> None:
        """Count the use of keys at other fronts, by front and key."""
        now = self._clock.now_seconds()
        accounts = {_name(account): account for account in self._keys if account.has_limits}
        for account in accounts.values():
            account.others_in_flight = 0
        for front, uses in fronts.items():
            before = self._heard.pop(front, {})
            self._heard[front] = before
            for name, use in uses.items():
                if name in accounts:
                    _count(accounts[name], use, before.get(name), now)
                    before[name] = use
            for name in before.keys() - accounts.keys():
                del before[name]
        while len(self._heard) > MOST_FRONTS:
            del self._heard[next(iter(self._heard))]


def _count(account: Account, use: KeyUse, before: KeyUse | None, now_seconds: float) -> None:
    account.others_in_flight += use.in_flight
    if before is None:
        account.fall_to("requests", use.missing_requests, now_seconds)
        account.fall_to("tokens", use.missing_tokens, now_seconds)
        return
    account.charge_others("requests", use.requests - before.requests, now_seconds)
    account.charge_others("tokens", use.tokens - before.tokens, now_seconds)


def _use(account: Account, now_seconds: float) -> KeyUse:
    return KeyUse(
        account.used["requests"],
        account.used["tokens"],
        account.in_flight,
        account.missing("requests", now_seconds),
        account.missing("tokens", now_seconds),
    )


def _weight(use: KeyUse) -> tuple[int, int]:
    return (use.in_flight + use.missing_requests, use.missing_tokens)


def _name(account: Account) -> str:
    return account.key.digest.hex()[:NAME_DIGITS]
