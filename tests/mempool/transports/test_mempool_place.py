"""How instances of one host find each other, by either transport."""

import stat
from pathlib import Path

import pytest

from kvell.mempool.rendezvous import SECRET_BYTES, FolderRendezvous, PageTransport, make_folder
from kvell.wire.endpoints import endpoint_of, listen_at


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
