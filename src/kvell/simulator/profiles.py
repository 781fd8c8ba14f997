"""How long a step takes on a named device, from the work it holds: an analytic profile.

A step takes as long as the slower of computing and reading::

    seconds = overhead + max(flops / (peak × efficiency), bytes / (bandwidth × efficiency))

Profiles are TOML files beside this module, each with its source; they are meant to be edited.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from kvell.errors import ChangeSomething

HARDWARE_DIR = Path(__file__).with_name("hardware")
DEFAULT_HARDWARE = "a100-80"


@dataclass(frozen=True)
class StepCost:
    """What one step computes and reads.

    :param flops: floating-point operations of all tokens, attention included.
    :param read_bytes: weights, and the KV that its tokens attend to.
    """

    flops: float
    read_bytes: float


@dataclass(frozen=True)
class DeviceProfile:
    """A device: rates in operations and bytes per second, efficiencies as fractions of them."""

    name: str
    peak_flops: float
    flops_efficiency: float
    bandwidth_bytes: float
    bandwidth_efficiency: float
    step_overhead_seconds: float

    def step_seconds(self, cost: StepCost) -> float:
        """Seconds of a step; never falls when either part of the cost grows."""
        computing = cost.flops / (self.peak_flops * self.flops_efficiency)
        reading = cost.read_bytes / (self.bandwidth_bytes * self.bandwidth_efficiency)
        return self.step_overhead_seconds + max(computing, reading)


def hardware_names(directory: Path = HARDWARE_DIR) -> list[str]:
    """Names of the profiles there are."""
    return sorted(path.stem for path in directory.glob("*.toml"))


def load_profile(name: str, directory: Path = HARDWARE_DIR) -> DeviceProfile:
    """The profile of a name, or of a TOML file's path.

    :raises ChangeSomething: if there is none, or it lacks a positive number.
    """
    path = directory / f"{name}.toml"
    if name not in hardware_names(directory):
        path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        known = ", ".join(hardware_names(directory))
        raise ChangeSomething("--hardware", name, "is no profile", f"use a TOML file or {known}")
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ChangeSomething("--hardware", name, f"is no TOML ({error})", "repair it") from error
    return DeviceProfile(
        path.stem,
        **{field.name: _rate(raw, field.name, name) for field in fields(DeviceProfile)[1:]},
    )


def _rate(raw: dict[str, object], field: str, name: str) -> float:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ChangeSomething(
            "--hardware", name, f"{field} is {value!r}", "give a number above zero"
        )
    return float(value)
