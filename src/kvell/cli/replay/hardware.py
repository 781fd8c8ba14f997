"""The step timer of ``--hardware``: a profile's name, a profile's file, or a calibration."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvell.cli.replay.models import ReplayModels
from kvell.errors import ChangeSomething
from kvell.wire.decoding import read_bounded

if TYPE_CHECKING:
    from kvell.simulator.replay.runner import StepTimer

CALIBRATION_SUFFIX = ".json"


def step_timer(
    hardware: str, model: str, dtype: str, models: ReplayModels, *, any_machine: bool = False
) -> "StepTimer":
    """Return the timer of steps of these models on that hardware.

    :param any_machine: whether to accept a calibration of another machine or version of Kvell.
    :raises ChangeSomething: if there is no such hardware; for a calibration also if it is stale,
        of another model, or used with a draft model, which calibrations do not time.
    """
    if Path(hardware).suffix != CALIBRATION_SUFFIX:
        from kvell.simulator.hardware.profiles import load_profile
        from kvell.simulator.replay.runner import Machine

        return Machine(load_profile(hardware), models.cost, models.draft_cost)
    return _calibrated(hardware, model, dtype, models, any_machine)


def _calibrated(
    hardware: str, model: str, dtype: str, models: ReplayModels, any_machine: bool
) -> "StepTimer":
    from kvell.calibration.prints import machine_print, model_print, software_print
    from kvell.cost.calibration import decode_calibration, require_fresh
    from kvell.simulator.replay.runner import CalibratedMachine

    if models.draft_cost is not None:
        problem = "knows no draft model's passes"
        raise ChangeSomething("--hardware", hardware, problem, "use a profile, or no draft model")
    try:
        data = read_bounded(Path(hardware))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ChangeSomething("--hardware", hardware, problem, "run `kvell calibrate`") from error
    calibration = decode_calibration(data, hardware)
    machine = calibration.machine
    require_fresh(
        calibration,
        hardware,
        model_print(model, dtype, models.description, models.cost.active_weights),
        None if any_machine else machine_print(machine.device, machine.threads),
        None if any_machine else software_print(),
    )
    return CalibratedMachine(calibration)
