"""What keys use at all fronts of a cluster, so that their limits hold for all of them together.

::

    this front ── told(): what each key used here so far ──► beat ──► manager
    this front ◄── heard(): the same of every other front ── roster ◄── manager

Counts only grow by what is new since they were heard last, so that it does not matter how often a
roster comes, whether one is lost, or whether the manager has started again.  A front that is heard
of for the first time may have counted before this one has started: then this one has at most as
much left as that one.
"""

import heapq
from collections.abc import Mapping

from kvell.clock import Clock
from kvell.fleet.manager.messages import MOST_KEYS_TOLD, NAME_DIGITS, KeyUse
from kvell.server.access.accounts import Account
from kvell.server.access.keys import Holder, KeyRing

MOST_FRONTS = 64
"""Fronts whose counts are kept, those that were heard of longest ago first to be forgotten."""


class SharedUse:
    """A :class:`.KeyUses` over the keys of a server."""

    def __init__(self, keys: KeyRing, clock: Clock) -> None:
        self._keys, self._clock = keys, clock
        self._heard: dict[str, dict[str, KeyUse]] = {}

    def told(self) -> dict[str, KeyUse]:
        """What each key with limits used here; of many, those that have used most of late."""
        now = self._clock.now_seconds()
        uses = {_name(one): _use(one.account, now) for one in self._keys if one.account.has_limits}
        if len(uses) <= MOST_KEYS_TOLD:
            return uses
        return dict(heapq.nlargest(MOST_KEYS_TOLD, uses.items(), key=lambda one: _weight(one[1])))

    def heard(self, fronts: Mapping[str, Mapping[str, KeyUse]]) -> None:
        """Count what keys used at other fronts, by front and key."""
        now = self._clock.now_seconds()
        accounts = {_name(one): one.account for one in self._keys if one.account.has_limits}
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
    account.charge("requests", use.requests - before.requests, now_seconds)
    account.charge("tokens", use.tokens - before.tokens, now_seconds)


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


def _name(holder: Holder) -> str:
    """The beginning of the key's digest, which tells keys apart and nothing of the key."""
    return holder.key.digest.hex()[:NAME_DIGITS]
