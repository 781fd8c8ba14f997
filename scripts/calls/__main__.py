"""Print how many of Kvell's functions a plain chat request calls."""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from kvell.models.sources.packaged import packaged_model
from scripts.calls.trace import ladders
from tests.shallow_model import write_shallow


def main() -> None:
    """Print the budgets' table of ``tests/test_calls``, or JSON with the calls of each function."""
    parser = argparse.ArgumentParser(prog="python -m scripts.calls", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all calls, as JSON")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        write_shallow(packaged_model(Path(folder, "packaged")), Path(folder))
        table = ladders(Path(folder))
    if options.json:
        print(json.dumps({work: ladder.calls for work, ladder in table.items()}, indent=1))
        return
    print("BUDGETS = {")
    for work, ladder in table.items():
        print(f"    {json.dumps(work)}: {json.dumps(ladder.figures())},")
    print("}")


if __name__ == "__main__":
    main()
