"""The ring of keys: finds the right account, compares all, keeps what is used at a reload."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.access.accounts import ApiKey, RateExceeded
from kvell.server.access.keys import OPERATOR, KeyRing, digest_of, operator_key


def key(text: str, tenant: str = "t", requests: int | None = None) -> ApiKey:
    return ApiKey(tenant, digest_of(text.encode()), requests)


@given(st.lists(st.binary(max_size=8), unique=True, min_size=1, max_size=6), st.binary(max_size=8))
def test_it_finds_the_keys_it_has_and_no_other(texts: list[bytes], other: bytes) -> None:
    ring = KeyRing([ApiKey(f"t{i}", digest_of(text)) for i, text in enumerate(texts)], 0.0)
    for i, text in enumerate(texts):
        account = ring.find(text)
        assert account is not None
        assert account.key.tenant == f"t{i}"
    assert (ring.find(other) is None) == (other not in texts)


@pytest.mark.parametrize("sent", ["first", "second", "third", "none"])
def test_every_key_is_compared_whichever_is_right(
    monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    ring = KeyRing([key("first"), key("second"), key("third")], 0.0)
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    ring.find(sent.encode())
    assert compared == [digest_of(text) for text in (b"first", b"second", b"third")]


def test_a_key_alone_is_an_operators_and_is_kept_as_a_digest() -> None:
    alone = operator_key("secret")
    assert alone.is_operator
    assert alone.tenant == OPERATOR
    assert alone.digest == hashlib.sha256(b"secret").digest()
    assert "secret" not in repr(alone)


def test_an_empty_ring_knows_nobody() -> None:
    ring = KeyRing([], 0.0)
    assert ring.is_empty
    assert len(ring) == 0
    assert ring.find(b"") is None


def test_keys_that_stay_keep_what_they_have_used() -> None:
    stays, changes = key("a", requests=1), key("b", requests=1)
    ring = KeyRing([stays, changes], 0.0)
    for text in (b"a", b"b"):
        account = ring.find(text)
        assert account is not None
        account.take_request(0.0)
    ring.replace([key("b", requests=2), stays, key("c")], 0.0)
    assert len(ring) == 3
    again, wider = ring.find(b"a"), ring.find(b"b")
    assert again is not None
    assert wider is not None
    with pytest.raises(RateExceeded):
        again.take_request(0.0)
    wider.take_request(0.0)


def test_keys_that_went_are_unknown() -> None:
    ring = KeyRing([key("a"), key("b")], 0.0)
    ring.replace([key("b")], 0.0)
    assert ring.find(b"a") is None
    assert ring.find(b"b") is not None
