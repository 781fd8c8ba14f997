"""Keys of a start: from the command line, from a file, and what is said of them."""

import logging
import socket
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.server.api.serve_options import ServeOptions
from kvell.server.logs.lines import FIELDS
from kvell.server.run import serve
from kvell.server.serving_keys import ServingKeys
from kvell.server.text.text_model import Texts
from kvell.testing.instance import ByteText

FILE = '[[keys]]\nname = "team"\nkey = "team-key"\n'


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


def tenant(keys: ServingKeys, key: bytes) -> str | None:
    account = keys.ring.find(key)
    return None if account is None else account.key.tenant


def test_without_keys_the_ring_is_empty() -> None:
    assert ServingKeys(ServeOptions()).ring.is_empty


def test_a_single_key_is_an_operators() -> None:
    keys = ServingKeys(ServeOptions(api_key="secret"))
    account = keys.ring.find(b"secret")
    assert account is not None
    assert account.key.is_operator
    assert len(keys.ring) == 1


def test_both_sources_count(key_file: Path) -> None:
    keys = ServingKeys(ServeOptions(api_key="secret", api_key_file=key_file))
    assert (tenant(keys, b"secret"), tenant(keys, b"team-key")) == ("operator", "team")
    assert tenant(keys, b"other") is None


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused_since_everybody_could_send_it(key: str) -> None:
    with pytest.raises(ChangeSomething, match="api_key=''"):
        ServingKeys(ServeOptions(api_key=key))


def test_one_key_in_both_sources_is_refused_without_showing_it(key_file: Path) -> None:
    with pytest.raises(ChangeSomething) as caught:
        ServingKeys(ServeOptions(api_key="team-key", api_key_file=key_file))
    assert "team-key" not in str(caught.value)


def test_a_reload_takes_what_the_file_says_and_keeps_the_single_key(key_file: Path) -> None:
    keys = ServingKeys(ServeOptions(api_key="secret", api_key_file=key_file))
    key_file.write_text('[[keys]]\nname = "new"\nkey = "new-key"\n')
    keys.reload()
    assert tenant(keys, b"team-key") is None
    assert (tenant(keys, b"new-key"), tenant(keys, b"secret")) == ("new", "operator")


def test_a_reload_of_a_wrong_file_changes_nothing(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ServingKeys(ServeOptions(api_key_file=key_file))
    key_file.write_text("[[keys]]\n")
    keys.reload()
    assert tenant(keys, b"team-key") == "team"
    key_file.unlink()
    keys.reload()
    assert tenant(keys, b"team-key") == "team"
    assert [record.getMessage() for record in caplog.records] == ["keys_not_read"] * 2


def test_a_file_that_others_may_read_is_told_with_a_remedy(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ServingKeys(ServeOptions(api_key_file=key_file))
    assert caplog.records == []
    key_file.chmod(0o644)
    ServingKeys(ServeOptions(api_key_file=key_file))
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "key_file_readable_by_others",
    )
    assert getattr(record, FIELDS) == {"remedy": f"chmod 600 {key_file}"}


@pytest.mark.parametrize(
    ("host", "key", "is_told"),
    [("127.0.0.1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "secret", False)],
)
def test_a_server_open_to_the_network_says_so(
    host: str, key: str | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InstanceStartError):
        serve(["true"], Texts.of(ByteText()), ServeOptions(host, 0, key))
    told = [getattr(r, FIELDS) for r in caplog.records if r.getMessage() == "open_to_the_network"]
    assert [one["host"] for one in told] == ([host] if is_told else [])


def test_wrong_keys_are_said_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServeOptions(port=port, api_key_file=tmp_path / "none")
        with pytest.raises(ChangeSomething) as caught:
            serve(["true"], Texts.of(ByteText()), options)
    assert caught.value.field == "--api-key-file"
