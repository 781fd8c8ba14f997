"""Whatever bytes come, there is one error, and every decoder of the product is asked through it."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvell
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import RequestId
from kvell.wire.decoding import MalformedError, decode, decode_json, decode_toml, read_bounded
from kvell.wire.frames import ProtocolError
from tests.depth import some
from tests.wire.hostile import HOSTILE

SOURCES = Path(kvell.__file__).parent
THE_PLACE = SOURCES / "wire" / "decoding.py"
WAYS = (
    *(
        "msgspec.json.decode",
        "msgspec.msgpack.decode",
        "msgspec.toml.decode",
        "msgspec.yaml.decode",
    ),
    *("json.loads", "json.load", "tomllib.loads", "tomllib.load"),
)
DECODERS = (msgspec.msgpack.Decoder, msgspec.json.Decoder)


def decoders() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages([str(SOURCES)], "kvell."):
        try:
            loaded = importlib.import_module(module.name)
        except ImportError:  # of an extra that is not installed
            continue
        for name, value in vars(loaded).items():
            several = value if isinstance(value, dict) else {"": value}
            for key, one in several.items():
                if isinstance(one, DECODERS):
                    found[f"{module.name}.{name}{key}"] = one
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    found = decoders()
    assert len(found) > 40
    return found


def attempt(decoder: Any, data: bytes) -> None:
    """Read a message, or find that it is none."""
    try:
        decode(decoder, data)
    except MalformedError as error:
        assert isinstance(error, ProtocolError)
        assert str(error).startswith("malformed message: ")


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_no_decoder_has_another_error(known: dict[str, Any], data: bytes) -> None:
    for decoder in known.values():
        attempt(decoder, data)


@pytest.mark.hypothesis
@some()
@given(data=st.data(), noise=st.binary(max_size=64))
def test_nor_for_any_bytes(known: dict[str, Any], data: st.DataObject, noise: bytes) -> None:
    decoder = known[data.draw(st.sampled_from(sorted(known)))]
    attempt(decoder, noise)


@pytest.mark.hypothesis
@some()
@given(at=st.integers(0, 200), bits=st.integers(1, 255))
def test_nor_for_a_message_with_flipped_bits(at: int, bits: int) -> None:
    asked = Submit(RequestSpec(RequestId("a request"), b"\x01\x00\x00\x00", SamplingParams()))
    sound = bytearray(msgspec.msgpack.encode(asked))
    sound[at % len(sound)] ^= bits
    attempt(msgspec.msgpack.Decoder(Submit), bytes(sound))


def asked_elsewhere(tree: ast.Module) -> Iterator[int]:
    """Lines that decode by themselves."""
    owned = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and _makes_decoders(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = ast.unparse(node.func)
        of = ast.unparse(node.func.value).partition("[")[0]
        is_decoder = node.func.attr == "decode" and (of in owned or of.endswith("Decoder"))
        if called in WAYS or is_decoder:
            yield node.lineno


def _makes_decoders(value: ast.expr | None) -> bool:
    return value is not None and any(
        isinstance(node, ast.Attribute) and node.attr == "Decoder" for node in ast.walk(value)
    )


def test_the_search_finds_each_way_to_decode() -> None:
    ways = ast.parse(
        "import msgspec\n"
        "ONE = msgspec.msgpack.Decoder(int)\n"
        "SOME: object = {'a': msgspec.json.Decoder(int)}\n"
        "ONE.decode(b'')\n"
        "SOME['a'].decode(b'')\n"
        "msgspec.json.decode(b'')\n"
        "json.loads('')\n"
        "b''.decode()\n"
    )
    assert list(asked_elsewhere(ways)) == [4, 5, 6, 7]


def test_nobody_decodes_by_itself() -> None:
    found = [
        f"{file.relative_to(SOURCES)}:{line}"
        for file in SOURCES.rglob("*.py")
        if file != THE_PLACE
        for line in asked_elsewhere(ast.parse(file.read_text()))
    ]
    assert not found, "use kvell.wire.decoding"


@pytest.mark.parametrize(
    "text", [*HOSTILE.values(), "[" * 100_000, '{"a":' * 100_000, "\ud800", "{"]
)
def test_json_and_toml_have_one_error_too(text: str | bytes) -> None:
    with pytest.raises(MalformedError, match="malformed a file: "):
        decode_json(text, "a file")
    if isinstance(text, str):
        with pytest.raises(MalformedError, match="malformed a file: "):
            decode_toml(text, "a file")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bounded(file, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes") as refused:
        read_bounded(file, 4)
    assert refused.value.strerror == "it has more than 4 bytes"


def test_keys_of_toml_are_not_nested_without_end() -> None:
    assert decode_toml("a.b = 1.5") == {"a": {"b": 1.5}}
    with pytest.raises(MalformedError, match="more than 32 dots"):
        decode_toml("a" + ".a" * 33 + " = 1")


def test_json_has_what_its_reader_asks_for() -> None:
    assert decode_json(b'{"a": [1, NaN]}', hook=len, constant=lambda _: 2) == 1
    assert decode_json('"\n"', strict=False) == "\n"
    assert decode_toml("a = 1") == {"a": 1}
