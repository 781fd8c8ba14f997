"""A calibration of a machine that does not exist."""

from kvell.cost.calibration import (
    Calibration,
    HeldOut,
    MachinePrint,
    ModelPrint,
    Serving,
    SoftwarePrint,
)
from tests.cost.oracles import oracle

MACHINE = MachinePrint("cpu", "A Processor (25.17.1)", 2, ("avx2", "avx512f"))
SOFTWARE = SoftwarePrint("0.1", "2.13.0", "c0de")
MODEL = ModelPrint("tiny", "bfloat16", "d1ce", 10**6, 1000)
MADE = Calibration(
    MACHINE, SOFTWARE, MODEL, oracle(), Serving(3e-3, 1e-3, 1e-4), 1e9, HeldOut(9, 0.02, 0.03, 0.04)
)
