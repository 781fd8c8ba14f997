"""Settings with flags: fields of records, also of records in records."""

from dataclasses import dataclass, field

import click
from click.testing import CliRunner

from kvell.cli.terminal.options import record_options
from kvell.flags import setting, setting_of, settings_with_flag


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...] = setting((), "--name", "Names.", "list", parse=tuple)
    width: int | None = setting(None, "--width", "A width.", "integer", most=9)


@dataclass(frozen=True)
class Outer:
    """A record of settings, one of them without a flag."""

    port: int = setting(8000, "--port", "A port.", "integer", least=0)
    share: float = setting(0.5, "--share", "A share.", "number", least=0, most=1, typed=None)
    seconds: float | None = setting(None, "--seconds", "A time.", "seconds")
    is_open: bool = setting(False, "--open", "Whether it is open.", "mark")
    chunks: bool = setting(True, "--chunks", "Whether there are chunks.", "switch")
    inner: Inner = field(default_factory=Inner)
    secret: str = "own"


@dataclass(frozen=True)
class Other:
    """A record with a setting of another one."""

    width: int | None = setting_of(Inner, "width")


def read(*words: str) -> Outer | str:
    """Return the record of a command line, or the message of its error."""
    records: list[Outer] = []

    @click.command()
    @record_options(Outer, "record")
    def command(record: Outer) -> None:
        records.append(record)

    ended = CliRunner().invoke(command, words)
    return records[0] if records else ended.output


def test_without_flags_a_record_has_its_defaults() -> None:
    assert read() == Outer()


def test_flags_reach_the_record_and_the_records_in_it() -> None:
    words = ("--port", "0", "--share", "1", "--open", "--no-chunks", "--name", "a", "--name", "b")
    inner = Inner(("a", "b"), 9)
    expected = Outer(port=0, share=1.0, is_open=True, chunks=False, inner=inner)
    assert read(*words, "--width", "9") == expected


def test_values_out_of_their_range_are_refused() -> None:
    for words in (("--port", "-1"), ("--share", "2"), ("--seconds", "0"), ("--width", "10")):
        assert words[0] in str(read(*words)), words
    assert "not finite" in str(read("--seconds", "inf"))


def test_help_shows_the_typed_default_and_a_settings_own_range() -> None:
    text = str(read("--help"))
    assert "default: 8000" in text and "default: 0.5" not in text
    assert "secret" not in text


def test_a_setting_of_another_record_is_the_same() -> None:
    [(same, flag)] = settings_with_flag(Other)
    assert (same.name, same.default) == ("width", None)
    assert flag == {each.name: flag for each, flag in settings_with_flag(Outer)}["width"]
