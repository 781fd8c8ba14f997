"""The table of mechanisms in ``docs/together.md``: what shows that two work together.

``python -m tests.together.pairs > docs/together.md`` writes it anew.
"""

import sys
from collections.abc import Iterator
from itertools import combinations_with_replacement

ENGINE = {
    "memory": "elastic memory (`--memory`)",
    "buffer": "CPU buffer (`--cpu-buffer`)",
    "offload": "prompts computed into the buffer (`--slo-ttft`)",
    "draft": "draft model (`--speculative-model`)",
    "async": "steps planned ahead (`--async-scheduling`)",
    "two models": "two models (`--model` twice)",
    "images": "images",
    "hybrid": "states beside attention (Falcon-H1)",
    "int8": "int8 KV cache (`--kv-cache-dtype int8`)",
}
"""Mechanisms of one engine."""
POOL = {
    "handover": "prefill and decode apart, with caching (`--pd-caching answers`)",
    "migration": "migration while a request decodes",
    "in place": "lending, read in place",
    "queries": "lending, by queries",
}
"""Ways of several engines to move requests and to lend."""
MECHANISMS = {**ENGINE, **POOL}

PAIRS = (
    "tests/together/test_together_table.py::test_answers_are_those_of_an_engine_without_pressure"
)
MOVING = "tests/together/test_together_moving.py"
POOLS = "tests/together/test_together_images.py"
OFFLOADED = "tests/together/test_together_offloaded.py"
HANDED_OVER = "tests/models/serving/test_models_handed_over.py"
LENT = "tests/models/serving/test_models_lent.py"
IMAGES = "tests/models/serving/test_models_images_handed_over.py"
PICTURES = "tests/together/test_together_images.py"
WITH = {
    "handover": f"{MOVING}::test_a_prompt_is_computed_at_one_and_answered_by_the_other",
    "migration": f"{MOVING}::test_a_request_migrates_in_the_middle_of_its_answer",
    "in place": f"{MOVING}::test_sections_of_a_request_are_read_at_creditors",
    "queries": f"{MOVING}::test_creditors_compute_attention_over_sections",
}
"""The test of each way for the mechanisms of an engine, one by one."""
OWN = {
    ("offload", "handover"): (
        f"{OFFLOADED}::test_some_are_computed_into_the_buffer_and_some_are_handed_over"
    ),
    ("offload", "migration"): (
        f"{OFFLOADED}::test_a_request_whose_prompt_was_computed_into_the_buffer_migrates"
    ),
    **dict.fromkeys(
        [("offload", "in place"), ("offload", "queries")],
        f"{OFFLOADED}::test_sections_of_a_request_whose_prompt_was_computed_into_the_buffer_are_lent",
    ),
    ("images", "handover"): f"{IMAGES}::test_in_every_mode_over_every_transport",
    ("images", "migration"): f"{IMAGES}::test_a_request_leaves_in_the_middle_of_its_answer",
    ("images", "in place"): f"{PICTURES}::test_sections_with_an_image_are_read_at_creditors",
    ("images", "queries"): (
        f"{PICTURES}::test_creditors_compute_attention_over_sections_with_an_image"
    ),
    ("handover", "handover"): f"{HANDED_OVER}::test_a_second_turn_in_every_mode",
    (
        "migration",
        "migration",
    ): f"{HANDED_OVER}::test_a_request_migrates_in_the_middle_of_its_answer",
    ("in place", "in place"): f"{LENT}::test_an_answer_is_the_same_bits_while_its_sections_go",
    (
        "queries",
        "queries",
    ): "tests/engine/lending/test_engine_shared.py::test_two_creditors_and_one_of_them_dies",
    ("handover", "migration"): f"{POOLS}::test_a_request_that_was_handed_over_migrates_on",
    **dict.fromkeys(
        [("handover", "in place"), ("handover", "queries")],
        f"{POOLS}::test_sections_of_a_request_that_was_handed_over_are_lent",
    ),
    **dict.fromkeys(
        [("migration", "in place"), ("migration", "queries")],
        f"{POOLS}::test_sections_of_a_request_that_migrated_are_lent_and_then_it_stays",
    ),
}
"""Tests of one pair."""
WHY_NOT = {
    ("in place", "queries"): (
        "A pool has one transport, so all creditors of a request are read in one way."
    ),
}
"""Pairs without a test, each with its reason."""


def pairs() -> Iterator[tuple[str, str]]:
    """Yield each pair once, a mechanism with itself first."""
    yield from combinations_with_replacement(MECHANISMS, 2)


def shown_by(first: str, second: str) -> str:
    """Return the test of a pair, as pytest names it; "" if there is none."""
    pair = (first, second)
    if pair in WHY_NOT:
        return ""
    if pair in OWN:
        return OWN[pair]
    if second in ENGINE:
        return f"{PAIRS}[{first if first == second else f'{first}+{second}'}]"
    return f"{WITH[second]}[{first}]"


def page() -> str:
    letters: dict[str, str] = {}
    rows: list[str] = []
    names = list(MECHANISMS)
    for row, second in enumerate(names):
        cells: list[str] = []
        for first in names[: row + 1]:
            test = shown_by(first, second).split("[")[0]
            if not test:
                cells.append(f"[{list(WHY_NOT).index((first, second)) + 1}]")
            else:
                cells.append(letters.setdefault(test, chr(ord("a") + len(letters))))
        rows.append(" | ".join([f"| **{row + 1}** {MECHANISMS[second]}", *cells]) + " |")
    head = "| | " + " | ".join(str(n + 1) for n in range(len(names))) + " |"
    tests = [f"| {letter} | `{test}` |" for test, letter in letters.items()]
    reasons = [
        f"{n + 1}. *{' and '.join(pair)}*: {WHY_NOT[pair]}" for n, pair in enumerate(WHY_NOT)
    ]
    return "\n".join(
        [
            "# What works together",
            "",
            "Each letter is a test that compares tokens: answers with both mechanisms are",
            "those of an engine without them. Each number is a reason.",
            "`python -m tests.together.pairs` makes this page.",
            "",
            head,
            "|---" * (len(names) + 1) + "|",
            *rows,
            "",
            "| | test |",
            "|---|---|",
            *tests,
            "",
            *reasons,
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
