"""``python -m scripts.reference.families``: write the served families into ``README.md``."""

import re
import textwrap
from pathlib import Path

from kvell.models.families.families import family_names

PAGE = Path(__file__).parents[2] / "README.md"
MARKS = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- /families -->)", re.DOTALL)
WIDTH = 120


def with_families(text: str) -> str:
    """Return a document with the served families between its marks."""
    names = ", ".join(family_names()) + "."
    lines = textwrap.wrap(names, WIDTH, break_long_words=False, break_on_hyphens=False)
    return MARKS.sub("\n".join(lines) + "\n", text)


if __name__ == "__main__":
    PAGE.write_text(with_families(PAGE.read_text()))
