"""Sections as one Markdown page; pure."""

from collections.abc import Sequence

from bench.comparison.section import Section

COMMAND = "python -m bench.comparison"
PLOTS = "plots"


def page(sections: Sequence[Section], missing: Sequence[str]) -> str:
    """The whole page.

    :param missing: files that were not there.
    """
    parts = [
        "# Kvell beside others",
        f"Made by `{COMMAND}` from the files beside it; each part names the command that measures "
        "it "
        "anew. Only figures of one run compare: machines differ, and this one is never quiet.",
        *(_part(section) for section in sections),
    ]
    if missing:
        parts.append("Not measured yet: " + ", ".join(f"`{name}`" for name in missing) + ".")
    return "\n\n".join(parts) + "\n"


def _part(section: Section) -> str:
    plots = [f"![{bars.title}]({PLOTS}/{bars.name}.svg)" for bars in section.bars]
    source = f"[`{section.source}`]({section.source}), `{section.command}`"
    return "\n\n".join([f"## {section.title}", section.note, *plots, _table(section), source])


def _table(section: Section) -> str:
    rule = [":--", *("--:" for _ in section.columns[1:])]
    rows = [section.columns, rule, *section.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
