"""``python -m scripts.reference.equivalents``: writes ``docs/equivalents.md``."""

from collections.abc import Iterator
from pathlib import Path

from kvell.equivalents.entry import Equivalent
from kvell.equivalents.table import EQUIVALENTS, REFUSED_VALUES, VALUES

PAGE = Path(__file__).parents[2] / "docs" / "equivalents.md"
HEAD = """# Flags of vLLM and SGLang

Made from the code by `python -m scripts.reference.equivalents`. Flags that Kvell has under the
same name are not listed: see `kvell serve --help-all`. The same names work as keys of
`--config FILE`, and as arguments of `LLM(…)` and `AsyncEngine(…)` where these have the setting.

- **honoured**: translated to the flags of Kvell that the table names;
- **accepted**: without effect, with one line on stderr, because Kvell does it anyway;
- **refused**: an error with the same sentence, before anything is loaded.
"""


def page() -> str:
    """Return the text of the page."""
    flags = "\n".join(f"| {' | '.join(_cells(entry))} |" for entry in EQUIVALENTS)
    values = "\n".join(f"| `{flag}` | {given} | {words} |" for flag, given, words in _value_rows())
    return (
        f"{HEAD}\n| flag | of | | in Kvell |\n|---|---|---|---|\n{flags}\n\n"
        f"## Values\n\n| flag | value | in Kvell |\n|---|---|---|\n{values}\n"
    )


def _cells(entry: Equivalent) -> tuple[str, ...]:
    sentence = _sentence(entry.sentence)
    return _codes(entry.names), entry.system, _treatment(entry), sentence


def _treatment(entry: Equivalent) -> str:
    if entry.accepts:
        return f"{_codes(sorted(entry.accepts))} accepted, else refused"
    return entry.action


def _value_rows() -> Iterator[tuple[str, str, str]]:
    for flag, values in VALUES.items():
        for name, own in values.items():
            yield flag, f"`{name}`", f"`{own}`"
    for flag, refusals in REFUSED_VALUES.items():
        for sentence in dict.fromkeys(refusals.values()):
            given = [value for value, why in refusals.items() if why == sentence]
            yield flag, _codes(given), f"refused: {_sentence(sentence)}"


def _codes(names: "tuple[str, ...] | list[str]") -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
