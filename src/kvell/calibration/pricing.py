"""The prices that an instance reports: from a file, from a calibration of its own, or defaults."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvell.calibration.kept import KeptCalibrations
from kvell.calibration.prints import (
    FITTING_ROOMS,
    code_digest,
    machine_print,
    software_print,
)
from kvell.calibration.rig import CannotTimeError
from kvell.calibration.run import calibrate_within
from kvell.calibration.subject import print_of, subject_of
from kvell.clock import Clock
from kvell.cost.amounts import shape_of
from kvell.cost.calibration import Calibration, decode_calibration, require_fresh
from kvell.cost.prices import DEFAULT_PRICES, InstancePrices, prices_of
from kvell.device.available import give_back_freed
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import Progress
from kvell.wire.decoding import read_bounded

LEAST_SHARE = 0.25
"""Part of one processor below which a calibration measured other programs, and is dropped."""
BUDGET_SECONDS = 1.9
"""Time of the engine that is built for it, and of its steps; some of 2 s is left to free it."""
FETCH_BYTES_PER_SECOND = {"memory": 4.9e9, "tcp": 2e8}
"""Most bytes per second of pages between two instances, by transport (``docs/mempool.md``)."""
FLAG = "--calibration"


@dataclass(frozen=True)
class OwnPricing:
    """A :data:`kvell.engine.opened.Pricing`: an instance's prices by its own calibration.

    :param file: calibration that the user gave; None to calibrate now, or at an earlier start.
    :param transport: the transport of pages from other instances: ``memory`` or ``tcp``.
    """

    kept: KeptCalibrations
    clock: Clock
    progress: Progress
    file: Path | None
    transport: str
    budget_seconds: float = BUDGET_SECONDS
    process_seconds: Callable[[], float] = time.process_time

    def __call__(self, model: PagedModel, name: str, settings: EngineSettings) -> InstancePrices:
        """Return the prices of a model.

        The model's memory is attached to a pool that is freed before the return.

        :raises ChangeSomething: for a file that is not of this model, machine and code.
        """
        if self.file is not None:
            calibration = self._given(self.file, model, name, settings)
            origin = f"from {self.file.name}"
        elif settings.kv_budget is not None:  # dropped tokens make steps that no model prices
            return DEFAULT_PRICES
        else:
            try:
                calibration = self._own(model, name, settings)
                origin = "calibrated"
            except CannotTimeError:
                return DEFAULT_PRICES
        copies = calibration.copies.bytes_per_second or calibration.copy_bytes_per_second
        copies = max(1.0, copies)
        costs = prices_of(
            calibration,
            shape_of(model.description.layers),
            fetch_bytes_per_second=min(copies, FETCH_BYTES_PER_SECOND[self.transport]),
            swap_bytes_per_second=copies,
            chunk_tokens=settings.max_num_batched_tokens,
        )
        return InstancePrices(costs, origin, copies)

    def _given(
        self, file: Path, model: PagedModel, name: str, settings: EngineSettings
    ) -> Calibration:
        _check_described(file, settings)
        try:
            data = read_bounded(file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            raise ChangeSomething(FLAG, str(file), problem, "run `kvell calibrate`") from error
        calibration = decode_calibration(data, str(file), FLAG)
        require_fresh(
            calibration,
            str(file),
            print_of(model, name),
            machine_print(model.device.type, settings.threads),
            software_print(),
            FLAG,
        )
        return calibration

    def _own(self, model: PagedModel, name: str, settings: EngineSettings) -> Calibration:
        key = (
            machine_print(model.device.type, settings.threads),
            software_print(),
            code_digest(rooms=FITTING_ROOMS),
            replace(print_of(model, name), name=""),
            settings.quantization,
            settings.kv_cache_dtype,
            settings.enforce_eager,
        )
        return self.kept.get(repr(key), lambda: self._measured(model, name, settings))

    def _measured(self, model: PagedModel, name: str, settings: EngineSettings) -> Calibration:
        """Calibrate a model in an engine of its own, which is freed again.

        The engine that serves is built afterwards, so both together never take more than its
        contract: the pools have one size, and a first touch commits their memory.
        """
        end_seconds = self.clock.now_seconds() + self.budget_seconds
        subject = subject_of(model, name, _alone(settings))
        try:
            started_seconds = self.clock.now_seconds()
            computed_seconds = self.process_seconds()
            calibration = calibrate_within(
                subject,
                self.clock,
                self.progress,
                end_seconds - started_seconds,
                threads=settings.threads,
            )
            passed_seconds = self.clock.now_seconds() - started_seconds
            computed_seconds = self.process_seconds() - computed_seconds
            if computed_seconds < LEAST_SHARE * passed_seconds:
                raise CannotTimeError("other programs had the processors meanwhile")
            return calibration
        finally:
            subject.engine.close()
            del subject
            gc.collect()  # an engine and its parts refer to each other
            give_back_freed()


def _check_described(file: Path, settings: EngineSettings) -> None:
    """Refuse the settings that ``kvell calibrate`` refuses and that change a step's time."""
    quantization = None if settings.quantization == "none" else settings.quantization
    for flag, value in {"--quantization": quantization, "--kv-budget": settings.kv_budget}.items():
        if value is not None:
            problem = f"does not hold with {flag} {value}"
            raise ChangeSomething(FLAG, str(file), problem, f"drop {flag} or {FLAG}")


def _alone(settings: EngineSettings) -> EngineSettings:
    return replace(
        settings,
        beside=(),
        pool_place=None,
        cpu_buffer_bytes=None,
        slo_ttft_seconds=None,
        slo_tpot_seconds=None,
        async_scheduling=False,
        num_speculative_tokens=0,
        speculative_model=None,
    )
