"""How instances of several hosts find each other: by what their front tells them."""

import stat
from pathlib import Path

import pytest

from kvell.errors import TryLater
from kvell.memory import GroupKind, LayerSpec, plan_layout
from kvell.mempool.pool import MemPool
from kvell.mempool.rendezvous import (
    SECRET_BYTES,
    FolderRendezvous,
    NetworkRendezvous,
    PageTransport,
    Rendezvous,
    make_folder,
)
from kvell.wire.endpoints import endpoint_of, listen_at

SECRET = bytes(range(32))
TEXT = list(range(40))


def place(name: str, host: str = "127.0.0.1") -> NetworkRendezvous:
    return NetworkRendezvous(name, "a-pool", host, SECRET)


def test_others_find_where_it_listens_once_they_are_told() -> None:
    here, there = place("a"), place("b")
    with listen_at(here.address()) as listener:
        here.publish(endpoint_of(listener))
        assert here.listens.startswith("tcp://127.0.0.1:")
        with pytest.raises(OSError, match="the address of a is unknown"):
            there.address_of("a")
        there.meet({"a": here.listens, "c": "tcp://10.0.0.3:1"})
        assert there.address_of("a") == endpoint_of(listener)


def test_what_was_told_before_does_not_count_any_more() -> None:
    one = place("a")
    told = {"b": "tcp://10.0.0.2:1", "c": "tcp://10.0.0.3:1"}
    one.meet(told)
    told["d"] = "tcp://10.0.0.4:1"  # the place has its own
    with pytest.raises(OSError, match="the address of d is unknown"):
        one.address_of("d")
    one.meet({"b": "tcp://10.0.0.2:2"})
    assert one.address_of("b") == "tcp://10.0.0.2:2"
    with pytest.raises(OSError, match="the address of c is unknown"):
        one.address_of("c")


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.2", "tcp://10.0.0.2:0"), ("::1", "tcp://[::1]:0")]
)
def test_it_listens_at_its_hosts_address_alone(host: str, address: str) -> None:
    assert place("a", host).address() == address


def test_the_secret_is_not_shown() -> None:
    one = place("a")
    assert one.secret() == SECRET
    assert repr(SECRET) not in repr(one) and SECRET.hex() not in repr(one)


def test_both_places_say_who_meets_there(tmp_path: Path) -> None:
    make_folder(tmp_path)
    places: list[Rendezvous] = [place("a"), FolderRendezvous("a", tmp_path)]
    assert [one.pool for one in places] == ["a-pool", tmp_path.name]
    assert {(one.instance, one.role, one.pd_caching) for one in places} == {("a", "mixed", 3)}
    assert all(len(one.secret()) == len(SECRET) for one in places)


def test_peers_come_back_to_the_address_that_listens() -> None:
    """Two machines with an address each: whoever is connected to sees the one that listens."""
    layers = [LayerSpec(0, GroupKind.FULL, kv_heads=1, head_size=64, element_bytes=2)]
    layout = plan_layout(layers, kv_memory_bytes=4 << 20)
    hosts = ("127.0.0.2", "127.0.0.3")
    with (
        MemPool(layout, instance="a", address=f"tcp://{hosts[0]}:0", secret=SECRET) as here,
        MemPool(layout, instance="b", address=f"tcp://{hosts[1]}:0", secret=SECRET) as there,
    ):
        lease = here.alloc_mem(tokens=len(TEXT))
        for address in lease.addresses:
            here.view(address)[:] = 7
        here.insert(TEXT, lease)
        assert there.address is not None
        here.connect(there.address)
        # The pages are pulled by the one that was connected to, over a connection back.
        assert here.transfer_with_insert("b", TEXT) == len(TEXT)
        found = there.match([*TEXT, 99])
        assert found.hit_tokens == len(TEXT)
        assert all((there.view(address) == 7).all() for address in found.addresses)
        there.free_mem(found)
        with pytest.raises(TryLater, match="no instance answers"):
            here.connect("tcp://127.0.0.4:9")


def test_the_secret_is_random_and_for_its_owner_alone(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        make_folder(folder)
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        found.append(FolderRendezvous("x", folder).secret())
    assert len(found[0]) == SECRET_BYTES and found[0] != found[1]


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_others_find_where_an_instance_listens(tmp_path: Path, transport: PageTransport) -> None:
    place, other = (FolderRendezvous(name, tmp_path, transport=transport) for name in "ab")
    for _ in range(2):  # its next incarnation too
        with listen_at(place.address()) as listener:
            place.publish(endpoint_of(listener))
            assert other.address_of("a") == endpoint_of(listener)
            assert [one.name for one in tmp_path.iterdir()] == ["a"]
    if transport == "tcp":
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_transports_may_change_at_a_restart(tmp_path: Path) -> None:
    transports: list[PageTransport] = ["tcp", "memory", "tcp"]
    for transport in transports:
        place = FolderRendezvous("a", tmp_path, transport=transport)
        with listen_at(place.address()) as listener:
            place.publish(endpoint_of(listener))
            assert place.address_of("a") == endpoint_of(listener)


def test_what_was_never_published_is_nowhere(tmp_path: Path) -> None:
    assert FolderRendezvous("a", tmp_path, transport="tcp").address_of("b") == tmp_path / "b"


def test_what_is_published_is_all_there_or_not_at_all(tmp_path: Path) -> None:
    """Whoever looks meanwhile finds the old address or the new one."""
    place = FolderRendezvous("a", tmp_path, transport="tcp")
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(10000, 10100)]
    place.publish(addresses[0])
    with (tmp_path / "a").open() as old:
        for address in addresses:
            place.publish(address)
            assert place.address_of("a") == address
        assert old.read() == addresses[0]  # files are replaced, not written over
