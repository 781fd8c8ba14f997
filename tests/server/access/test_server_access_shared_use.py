"""What keys used at other fronts: counted once, whatever is lost, repeated or started again."""

import pytest

from kvell.clock import VirtualClock
from kvell.errors import TryLater
from kvell.fleet.manager.messages import (
    MOST_KEYS_TOLD,
    FrontBeat,
    KeyUse,
    ToManager,
    decode_to_manager,
    encode_message,
)
from kvell.server.access.accounts import Account, ApiKey, RateExceeded
from kvell.server.access.keys import KeyRing, digest_of
from kvell.server.access.shared_use import MOST_FRONTS, SharedUse
from kvell.wire.frames import FrameReader, ProtocolError


def heard_by(uses: SharedUse) -> dict[str, dict[str, KeyUse]]:
    return uses._heard


def decoded(beat: FrontBeat) -> ToManager:
    [body] = FrameReader().feed(encode_message(beat))
    return decode_to_manager(body)


class OneFront:
    def __init__(self, *keys: ApiKey) -> None:
        self.clock = VirtualClock()
        self.ring = KeyRing(keys or (ApiKey("red", digest_of(b"red"), 100, 1000, False, 10),), 0.0)
        self.uses = SharedUse(self.ring, self.clock)

    @property
    def account(self) -> Account:
        return next(iter(self.ring))

    def uses_up(self, requests: int) -> None:
        for _ in range(requests):
            self.account.take_request(0.0)

    def left(self) -> int:
        return int(self.account.headers(0.0)["x-ratelimit-remaining-requests"])

    def meets(self, **others: "OneFront") -> None:
        self.uses.on_uses({name: one.uses.take() for name, one in others.items()})


def test_what_another_front_let_in_is_counted_once() -> None:
    one, other = OneFront(), OneFront()
    one.meets(other=other)
    other.uses_up(30)
    for _ in range(3):
        one.meets(other=other)
    assert one.left() == 70
    one.meets()  # a manager that has just started names nobody
    other.uses_up(5)
    one.meets(other=other)
    assert one.left() == 65


def test_what_both_let_in_at_once_is_waited_for() -> None:
    one, other = OneFront(), OneFront()
    one.meets(other=other)
    one.uses_up(100)
    other.uses_up(100)
    one.meets(other=other)
    with pytest.raises(RateExceeded) as caught:
        one.account.take_request(0.0)
    assert caught.value.retry_seconds == 61
    assert one.left() == 0


def test_tokens_that_were_given_back_come_back_everywhere() -> None:
    one, other = OneFront(), OneFront()
    one.meets(other=other)
    other.account.reserve(100, 400, 0.0)
    one.meets(other=other)
    other.account.give_back(300, 0.0)
    one.meets(other=other)
    assert one.account.headers(0.0)["x-ratelimit-remaining-tokens"] == "800"


def test_a_front_that_has_just_started_has_no_more_left_than_the_others() -> None:
    old, new = OneFront(), OneFront()
    old.uses_up(90)
    new.meets(old=old)
    assert new.left() == 10
    new.meets(old=old)
    assert new.left() == 10
    new.uses_up(10)
    old.meets(new=new)
    assert old.left() == 0


def test_others_in_flight_count_while_they_are_there() -> None:
    one, other = OneFront(), OneFront()
    other.account.enter("n", 8, 8, 0.0)
    one.meets(other=other)
    with pytest.raises(TryLater, match="8 sequences in flight and may have 10") as caught:
        one.account.enter("n", 3, 3, 0.0)
    assert caught.value.bound == "sequences"
    one.account.enter("n", 2, 2, 0.0)
    one.meets()
    assert one.account.others_in_flight == 0


def test_keys_without_limits_and_keys_of_others_are_not_counted() -> None:
    free, other = OneFront(ApiKey("a", digest_of(b"a"))), OneFront()
    assert free.uses.take() == {}
    free.meets(other=other)
    assert heard_by(free.uses) == {"other": {}}


def test_a_beat_tells_of_so_many_keys_and_of_the_busiest() -> None:
    keys = [ApiKey("t", digest_of(b"%d" % n), 10) for n in range(MOST_KEYS_TOLD + 5)]
    one = OneFront(*keys)
    busy = list(one.ring)[-1]
    busy.take_request(0.0)
    told = one.uses.take()
    assert len(told) == MOST_KEYS_TOLD
    assert told[busy.key.digest.hex()[:16]] == KeyUse(requests=1, missing_requests=1)
    assert len(encode_message(FrontBeat(used=told))) < 32_000
    too_many = {f"{n:016x}": KeyUse() for n in range(MOST_KEYS_TOLD + 1)}
    for used in (too_many, {"0" * 17: KeyUse()}, {"0": KeyUse(requests=-1)}):
        with pytest.raises(ProtocolError):
            decoded(FrontBeat(used=used))
    assert decoded(FrontBeat(used=told)) == FrontBeat(used=told)


def test_so_many_fronts_are_remembered() -> None:
    one = OneFront()
    for n in range(2 * MOST_FRONTS):
        one.uses.on_uses({f"front-{n}": {}})
    assert len(heard_by(one.uses)) == MOST_FRONTS
