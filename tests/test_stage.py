"""``scripts/stage``: says what is done, shows that it moves, and prints output only on failure."""

import os
import subprocess
from pathlib import Path

STAGE = Path(__file__).parent.parent / "scripts" / "stage"


def test_units_are_shown_while_the_command_still_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"echo '[5/10] Building'; read line < {gate}; echo '[10/10] Linking'"
    with subprocess.Popen(
        [STAGE, "compiling", "bash", "-c", script], stderr=subprocess.PIPE, text=True
    ) as stage:
        assert stage.stderr is not None
        assert stage.stderr.readline() == "kvell: compiling …\n"
        # The command waits at the gate, so this line was printed while it ran.
        assert stage.stderr.readline().endswith(" s, 5 of 10 files compiled\n")
        gate.write_text("go on\n")
        assert "Building" not in stage.stderr.read()
    assert stage.returncode == 0


def test_output_and_status_of_a_failure_are_told() -> None:
    script = "echo what went wrong; exit 7"
    told = subprocess.run(
        [STAGE, "fetching", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert told.returncode == 7
    assert "fetching failed (status 7)" in told.stderr
    assert "what went wrong" in told.stderr
