"""The file of keys: what it may say, and which entry and field a mistake is in."""

import hashlib
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.server.access.accounts import ApiKey
from kvell.server.access.key_file import is_readable_by_others, read_keys
from kvell.server.access.keys import digest_of

DIGEST = hashlib.sha256(b"alpha").hexdigest()
GOOD = f"""
[[keys]]
name = "one"
key = "sesame"

[[keys]]
name = "one"
sha256 = "{DIGEST.upper()}"
requests_per_minute = 60
tokens_per_minute = 100_000

[[keys]]
name = "ops"
key = "root key"
operator = true
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> ChangeSomething:
    with pytest.raises(ChangeSomething) as caught:
        read_keys(written(folder, text))
    return caught.value


def entry(text: str) -> str:
    """A file whose second entry has these lines."""
    return f'[[keys]]\nname = "fine"\nkey = "fine"\n[[keys]]\n{text}\n'


def test_keys_come_in_the_files_order(tmp_path: Path) -> None:
    one, same_tenant, operator = read_keys(written(tmp_path, GOOD))
    assert one == ApiKey("one", digest_of(b"sesame"), max_in_flight=1024, min_priority=0)
    assert same_tenant == ApiKey("one", digest_of(b"alpha"), 60, 100_000, False, 1024, 0)
    assert operator == ApiKey("ops", digest_of(b"root key"), None, None, True, 1024, 0)


def test_a_key_has_bounds_of_its_own_in_place_of_the_defaults(tmp_path: Path) -> None:
    lines = 'name = "a"\nkey = "k"\nmax_in_flight = 3\nmin_priority = -7'
    plain, own = read_keys(written(tmp_path, entry(lines)), 9)
    assert (plain.max_in_flight, plain.min_priority) == (9, 0)
    assert (own.max_in_flight, own.min_priority) == (3, -7)


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ('key = "k"', "name"),
        ('name = ""\nkey = "k"', "name"),
        ('name = "two words"\nkey = "k"', "name"),
        (f'name = "{"x" * 65}"\nkey = "k"', "name"),
        ('name = 3\nkey = "k"', "name"),
        ('name = "a"', "key"),
        (f'name = "a"\nkey = "k"\nsha256 = "{DIGEST}"', "key"),
        ('name = "a"\nkey = ""', "key"),
        ('name = "a"\nkey = " k"', "key"),
        ('name = "a"\nkey = "schlüssel"', "key"),
        ('name = "a"\nkey = 1', "key"),
        ('name = "a"\nsha256 = "12"', "sha256"),
        (f'name = "a"\nsha256 = "{DIGEST}0"', "sha256"),
        ('name = "a"\nkey = "k"\nrequests_per_minute = 0', "requests_per_minute"),
        ('name = "a"\nkey = "k"\nrequests_per_minute = 1.5', "requests_per_minute"),
        ('name = "a"\nkey = "k"\nrequests_per_minute = true', "requests_per_minute"),
        ('name = "a"\nkey = "k"\ntokens_per_minute = -1', "tokens_per_minute"),
        ('name = "a"\nkey = "k"\nmax_in_flight = 0', "max_in_flight"),
        ('name = "a"\nkey = "k"\nmin_priority = 0.5', "min_priority"),
        ('name = "a"\nkey = "k"\nmin_priority = true', "min_priority"),
        ('name = "a"\nkey = "k"\nmin_priority = 3_000_000_000', "min_priority"),
        ('name = "a"\nkey = "k"\noperator = "yes"', "operator"),
        ('name = "a"\nkey = "k"\nadmin = true', "admin"),
    ],
)
def test_a_mistake_names_entry_field_and_remedy(tmp_path: Path, lines: str, field: str) -> None:
    error = refusal(tmp_path, entry(lines))
    assert error.field == f"keys[1].{field}"
    assert error.remedy


@pytest.mark.parametrize(
    "text",
    [
        entry('name = "a"\nkey = "geheim "'),
        entry('name = "a"\nsha256 = "geheim"'),
        entry(f'name = "a"\nkey = "geheim"\nsha256 = "{DIGEST}"'),
        entry('name = "a"\nkey = "geheim\n'),
        entry('name = "a"\nkeys = "geheim"'),
        'keys = "geheim"',
        'keys = ["geheim"]',
        'api_key = "geheim"',
        '"geheim',
    ],
)
def test_no_complaint_shows_a_key(tmp_path: Path, text: str) -> None:
    error = refusal(tmp_path, text)
    assert "geheim" not in str(error)
    assert error.__cause__ is None


@pytest.mark.parametrize("text", ["", "keys = []", "keys = 3"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text).field == "keys"


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, GOOD + "[server]\nport = 1\n").field == "server"


def test_one_key_twice_is_refused_in_either_form(tmp_path: Path) -> None:
    twice = f'[[keys]]\nname = "a"\nkey = "alpha"\n[[keys]]\nname = "b"\nsha256 = "{DIGEST}"\n'
    error = refusal(tmp_path, twice)
    assert (error.field, error.problem) == ("keys[1]", "is the same key as keys[0]")


def test_where_it_is_no_toml_is_said(tmp_path: Path) -> None:
    error = refusal(tmp_path, "[[keys]]\nname = \n")
    assert error.field == "--api-key-file"
    assert "line 2" in error.problem


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ChangeSomething, match="is not valid TOML"):
        read_keys(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match="cannot be read"):
        read_keys(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)]
)
def test_who_may_read_it_is_known(tmp_path: Path, mode: int, is_open: bool) -> None:
    path = written(tmp_path, GOOD)
    path.chmod(mode)
    assert is_readable_by_others(path) is is_open


def test_a_file_too_large_for_keys_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "#" * (1 << 20) + "\n" + GOOD)
    assert (error.field, "it has more than" in error.problem) == ("--api-key-file", True)
