"""Print all figures of how source and tests are built, each with its budget."""

import argparse
import json
from collections.abc import Mapping

from scripts.house.circles import circles
from scripts.house.figures import code_lines, figures
from scripts.house.forms import full_folders, long_files, long_functions
from scripts.house.ladder import copies, lone_protocols, packed_statements, pass_on_functions
from scripts.house.reads import private_reads
from scripts.house.source import TESTS, modules
from scripts.prose import counts, violations
from tests.test_house import CIRCLES, CODE_LINES, MOST, MOST_VIOLATIONS

PLACES = ("pass-on", "protocols", "copies", "packed", "private")


def main() -> None:
    """Print the figures, the places of one, or the budgets as they would be today."""
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description=__doc__)
    parser.add_argument("--list", choices=PLACES, help="print the places of a figure")
    parser.add_argument(
        "--budgets", action="store_true", help="print tables to paste into tests/test_house.py"
    )
    options = parser.parse_args()
    if options.list:
        print("\n".join(_places(options.list)))
        return
    known = modules()
    rooms = dict(sorted(code_lines(known).items()))
    others = figures(known, modules(TESTS))
    prose = counts(violations())
    words = {kind: dict(sorted(prose[kind].items())) for kind in sorted(prose)}
    if options.budgets:
        for name, table in ("CODE_LINES", rooms), ("MOST", others), ("MOST_VIOLATIONS", words):
            print(f"{name}: dict[str, {'dict[str, int]' if table is words else 'int'}] = ", end="")
            print(json.dumps(table, indent=4).replace("\n}", ",\n}").replace("\n    }", ",\n    }"))
        return
    _print("lines of code by room", rooms, CODE_LINES)
    print(f"{sum(rooms.values()):10,} of {sum(CODE_LINES.values()):,}  in all\n")
    _print("figures", others, MOST)
    for kind, table in words.items():
        _print(f"English, {kind}", table, MOST_VIOLATIONS.get(kind, {}))
    print(f"circles: {circles(known)}; allowed: {CIRCLES}")
    print(f"full folders: {full_folders()}")
    print(f"long files: {long_files(known)}")
    print(f"long functions: {long_functions(known)}")


def _print(title: str, table: Mapping[str, int], budgets: Mapping[str, int]) -> None:
    """Print one table, with its budgets."""
    print(title)
    for name, number in table.items():
        budget = budgets.get(name, 0)
        note = "" if number == budget else "  above" if number > budget else "  below"
        print(f"{number:10,} of {budget:,}  {name}{note}")
    print()


def _places(figure: str) -> list[str]:
    """Return the places of a figure."""
    known = modules()
    if figure == "pass-on":
        return pass_on_functions(known)
    if figure == "protocols":
        return [f"{protocol}: {kind}" for protocol, kind in lone_protocols(known).items()]
    if figure == "copies":
        return copies(known)
    return packed_statements(known) if figure == "packed" else private_reads(modules(TESTS), known)


if __name__ == "__main__":
    main()
