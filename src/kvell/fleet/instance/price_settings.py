"""Settings of the prices that instances report."""

from dataclasses import dataclass
from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.flags import setting


@dataclass(frozen=True)
class PriceSettings:
    """The origin of the prices of instances; by default they calibrate themselves."""

    calibration: Path | None = setting(
        None,
        "--calibration",
        "Prices of the instances, from a file of kvell calibrate. [default: several instances"
        " calibrate themselves at their first start, within 2 s]",
        "file",
        metavar="FILE",
    )
    no_calibration: bool = setting(
        False,
        "--no-calibration",
        "Keep the default prices, which are those of smollm2.",
        "mark",
    )

    def __post_init__(self) -> None:
        if self.no_calibration and self.calibration is not None:
            problem = "contradicts --no-calibration"
            raise ChangeSomething("calibration", str(self.calibration), problem, "drop one of them")

    def flags(self) -> list[str]:
        words = ["--no-calibration"] if self.no_calibration else []
        if self.calibration is not None:
            words += ["--calibration", str(self.calibration.expanduser().absolute())]
        return words
