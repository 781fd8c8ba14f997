"""Engines decide today as they did when their journals were recorded."""

import pytest

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import replay
from tests.journals.cases import CASES
from tests.journals.recording import path_of, read
from tests.journals.structure import Plain, described, restored


def replayed(case: str, name: str, entries: list[Plain]) -> tuple[list[Plain], list[Plain]]:
    """Return the plans and the actions that recorded inputs make now, as plain values."""
    core, actions = CASES[case].fresh(name), list[Plain]()

    def each(now: EngineCore) -> None:
        actions.extend(described(action) for action in now.pool.take_actions())

    plans = replay((restored(entry) for entry in entries), core, each)
    return [described(plan) for plan in plans], actions


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_journal_makes_the_same_plans_and_actions(case: str) -> None:
    recordings = read(case)
    assert any(recording.plans for recording in recordings.values())
    for name, recording in recordings.items():
        plans, actions = replayed(case, name, recording.entries)
        assert plans == recording.plans, name
        # An instance that died may not have carried out all actions of its last plan.
        assert actions[: len(recording.actions)] == recording.actions, name


@pytest.mark.parametrize("case", CASES)
def test_a_description_restores_the_entry(case: str) -> None:
    for recording in read(case).values():
        for entry in recording.entries:
            assert described(restored(entry)) == entry


def test_an_input_left_out_changes_the_plans() -> None:
    """The comparison can fail."""
    recording = read("engine")["alone"]
    submits = [index for index, entry in enumerate(recording.entries) if entry["is"] == "Submit"]
    del recording.entries[submits[0]]
    with pytest.raises((AssertionError, ValueError)):
        assert replayed("engine", "alone", recording.entries)[0] == recording.plans


def test_every_file_has_a_case() -> None:
    files = {path.name for path in path_of("").parent.iterdir()}
    assert files == {path_of(case).name for case in CASES}


def test_recordings_have_what_they_are_for() -> None:
    """Loans that are read in place and by queries, streams, swaps, parking, drafts, images."""
    plans = {case: [plan for one in read(case).values() for plan in one.plans] for case in CASES}
    fields = {
        "lending_pressed_27": "borrowed",
        "asked": "borrowed",
        "placed": "borrowed",
        "disaggregated": "streams",
        "cpu_buffer": "parked",
        "elastic_memory": "slot",
        "engine": "preempted",
    }
    for case, field in fields.items():
        assert any(field in plan for plan in plans[case]), case
    work = {
        case: [work for plan in made for work in plan.get("work", ())]
        for case, made in plans.items()
    }
    assert any("proposed" in one for one in work["drafts"])
    assert any("images" in one for one in work["images"])
    assert {one.get("model") for one in work["several_models"]} == {"a", "b"}
