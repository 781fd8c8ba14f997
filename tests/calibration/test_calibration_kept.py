"""Kept calibrations: one process measures, others wait for it, and damaged files are made again."""

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest

from kvell.calibration.kept import WAIT_SECONDS, KeptCalibrations
from kvell.calibration.prints import code_digest, machine_print, model_print, software_print
from kvell.clock import VirtualClock
from kvell.cost.calibration import Calibration
from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import describe
from tests.cost.made import MADE

OTHER = replace(MADE, noise=0.5)


def never() -> Calibration:
    raise AssertionError("measured again")


def test_it_is_measured_once_for_each_key(tmp_path: Path) -> None:
    kept = KeptCalibrations(tmp_path, VirtualClock())
    assert kept.get("a", lambda: MADE) == MADE
    assert kept.get("b", lambda: OTHER) == OTHER
    later = KeptCalibrations(tmp_path, VirtualClock())
    assert later.get("a", never) == MADE
    assert later.get("b", never) == OTHER


@pytest.mark.parametrize("text", ["", "{", "{}", MADE.encode().decode()[:-40]])
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    kept = KeptCalibrations(tmp_path, VirtualClock())
    kept.get("a", lambda: MADE)
    kept.path("a").write_text(text)
    assert kept.get("a", lambda: OTHER) == OTHER
    assert kept.get("a", never) == OTHER


def test_nothing_is_left_but_the_file_and_its_lock(tmp_path: Path) -> None:
    kept = KeptCalibrations(tmp_path, VirtualClock())
    kept.get("a", lambda: MADE)
    path = kept.path("a")
    assert set(path.parent.iterdir()) == {path, path.with_suffix(".lock")}


def test_who_waits_reads_what_the_other_measured(tmp_path: Path) -> None:
    clock, other = VirtualClock(), KeptCalibrations(tmp_path, VirtualClock())
    other.path("a").parent.mkdir()
    with other.path("a").with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def pause(seconds: float) -> None:
            clock.advance(seconds)
            if clock.now_seconds() > 1.0:
                other.path("a").write_bytes(MADE.encode())
                fcntl.flock(lock, fcntl.LOCK_UN)

        assert KeptCalibrations(tmp_path, clock, pause).get("a", never) == MADE
    assert 1.0 < clock.now_seconds() < WAIT_SECONDS


@pytest.mark.parametrize(("lives", "seconds"), [(False, 0.0), (True, WAIT_SECONDS)])
def test_a_holder_is_waited_for_while_it_lives_and_not_for_ever(
    tmp_path: Path, lives: bool, seconds: float
) -> None:
    clock = VirtualClock()
    kept = KeptCalibrations(tmp_path, clock, clock.advance)
    lock_path = kept.path("a").with_suffix(".lock")
    lock_path.parent.mkdir()
    with lock_path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lives:
            lock.close()
        assert kept.get("a", lambda: MADE) == MADE
    assert clock.now_seconds() == pytest.approx(seconds, abs=0.1 if lives else 0.0)


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "prices").write_text("a file is in the way")
    assert KeptCalibrations(tmp_path, VirtualClock()).get("a", lambda: MADE) == MADE


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
DESCRIPTION = describe(config_from_dict(LLAMA), 2)


def test_this_machine() -> None:
    found = machine_print("cpu")
    assert found == machine_print("cpu")
    assert found.cores >= 1
    assert found.processor


def test_this_code() -> None:
    found = software_print()
    assert found.torch.startswith("2.")
    assert len(found.code) == 16


def test_a_changed_kernel_is_another_code(tmp_path: Path) -> None:
    room = tmp_path / "attention"
    room.mkdir()
    (room / "kernel.py").write_text("fast = False")
    before = code_digest(tmp_path)
    (tmp_path / "README.md").write_text("not run")
    assert code_digest(tmp_path) == before
    (room / "kernel.py").write_text("fast = True")
    assert code_digest(tmp_path) != before


def test_models_are_told_apart_by_their_sizes() -> None:
    first = model_print("a", "bfloat16", DESCRIPTION, 1000)
    assert model_print("b", "auto", DESCRIPTION, 1000).digest == first.digest
    others = [
        model_print("a", "float32", DESCRIPTION, 1000),
        model_print("a", "bfloat16", DESCRIPTION, 1001),
        model_print("a", "bfloat16", describe(config_from_dict(LLAMA), 4), 1000),
    ]
    assert first.digest not in [other.digest for other in others]
