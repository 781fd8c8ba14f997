import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.byte_sizes import format_bytes, parse_bytes, parse_count
from kvell.errors import ChangeSomething


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("24GB", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("192 mib", 192 * 2**20),
        (" 2TiB ", 2 * 2**40),
        ("7KB", 7000),
        ("64B", 64),
        ("4096", 4096),
    ],
)
def test_reads(text: str, size_bytes: int) -> None:
    assert parse_bytes(text, "--kv-memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.GiB", "-1GiB", "1 GiB 2", "2GX", "1e9", "nan"])
def test_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ChangeSomething, match="is not a size; write it like 512MiB") as caught:
        parse_bytes(text, "--kv-memory")
    assert (caught.value.field, caught.value.value) == ("--kv-memory", text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0MB"])
def test_refuses_nothing_at_all(text: str) -> None:
    with pytest.raises(ChangeSomething, match="must be more than zero"):
        parse_bytes(text, "--kv-memory")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (720 * 1024, "720 KiB"),
        (2**30 - 2**10, "1.00 GiB"),
        (12_345_678, "11.8 MiB"),
        (5 * 2**40, "5 TiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_writes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 2**50))
def test_what_is_written_reads_back_within_one_percent(size_bytes: int) -> None:
    again_bytes = parse_bytes(format_bytes(size_bytes).replace(",", ""), "size")
    assert abs(again_bytes - size_bytes) <= size_bytes / 100


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *[("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2m", 2_000_000)],
        *[("1M", 1 << 20), ("1g", 10**9), ("0", 0), ("0.5K", 512)],
        *[("1.0001k", None), ("k", None), ("8 k", None), ("8kb", None), ("-1", None), ("", None)],
        *[("1e3", None), ("٣", None), ("9" * 400, None)],
    ],
)
def test_counts_have_the_units_of_vllm(text: str, count: int | None) -> None:
    assert parse_count(text) == count
