"""Salts of the engine: different for different tenants, whatever clients send."""

from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvell.server.access.visit import engine_salt

names = st.text("abc:0123456789._-", min_size=1, max_size=20)
salts = st.text(max_size=60)
near = st.one_of(salts, st.builds(engine_salt, names, salts), names)
"""Salts that look like what another tenant's engine salt begins or ends with."""


@given(names, near, names, near)
@example("a", "b", "ab", "")
@example("1", "1:1", "1:1", "1")
@example("a", ":a", "a:", "a")
def test_no_two_tenants_share_a_salt(one: str, salt: str, other: str, crafted: str) -> None:
    assume(one != other)
    assert engine_salt(one, salt) != engine_salt(other, crafted)


@given(names, salts, salts)
def test_a_tenant_keeps_its_own_salts_apart(name: str, one: str, other: str) -> None:
    assume(one != other)
    assert engine_salt(name, one) != engine_salt(name, other)
    assert engine_salt(name, one) == engine_salt(name, one)


@given(names, names, st.data())
def test_a_salt_copied_from_another_tenant_does_not_reach_it(
    victim: str, attacker: str, data: st.DataObject
) -> None:
    assume(victim != attacker)
    seen = engine_salt(victim, data.draw(salts))
    cut = data.draw(st.integers(0, len(seen)))
    assert engine_salt(attacker, seen[cut:]) != seen


@given(salts)
def test_without_a_tenant_it_is_the_clients(salt: str) -> None:
    assert engine_salt("", salt) == salt
