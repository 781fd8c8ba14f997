"""The README's families are those that are served, and the figures of measured.md fit together."""

from kvell.models.families.families import family_names
from scripts.reference.families import MARKS, PAGE, with_families
from tests.docs.fences import DOCS
from tests.docs.tables import rows_under


def test_the_readme_lists_the_served_families() -> None:
    text = PAGE.read_text()
    assert with_families(text) == text, "run python -m scripts.reference.families"
    listed = MARKS.findall(text)[0].strip().rstrip(".").split(",")
    assert [name.strip() for name in listed] == family_names()


def test_ratios_are_those_of_their_figures() -> None:
    rows = rows_under((DOCS / "measured.md").read_text(), "question", "Kvell")
    assert len(rows) == 5
    for question, kvell, vllm, ratio, _ in rows:
        figures = [float(cell.replace(",", "")) for cell in (kvell, vllm)]
        assert f"{figures[0] / figures[1]:.2f}" == ratio, question


def test_the_readme_has_the_figures_of_measured() -> None:
    readme, measured = PAGE.read_text(), (DOCS / "measured.md").read_text()
    _, one, many, prompts = rows_under(readme, "Kvell / vLLM")[0]
    rows = {row[0]: f"{row[1]} / {row[2]}" for row in rows_under(measured, "question", "Kvell")}
    assert one == rows["output tokens/s, 1 request"]
    assert many == rows["output tokens/s, 32 requests"]
    assert prompts == rows["prompt tokens/s, 2,048 tokens"]
