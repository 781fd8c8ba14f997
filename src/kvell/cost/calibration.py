"""The calibration file of ``kvell calibrate``, and the checks that it is valid."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from kvell.cost.model import Fetch
from kvell.cost.operators import Operators
from kvell.cost.parallel import Parallel
from kvell.cost.work import Work
from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode

SCHEMA = 1
"""Version of the file; grows when old files would be misread."""


@dataclass(frozen=True)
class MachinePrint:
    """The facts about the machine that decide its speed.

    :param cores: number of cores that the process may use.
    :param threads: number of threads of a step; 0 on a GPU.
    """

    device: str
    processor: str
    cores: int
    features: tuple[str, ...]
    threads: int = 0


@dataclass(frozen=True)
class SoftwarePrint:
    """The code that was timed.

    :param code: digest of the engine's, the models' and the kernels' files, compiled ones too.
    """

    kvell: str
    torch: str
    code: str


@dataclass(frozen=True)
class ModelPrint:
    """The facts about the model that decide its steps.

    :param name: as it was given; models of other names and equal digest are the same.
    :param digest: of its layers' sizes and of the numbers' types.
    :param active_weights: numbers that one token is multiplied with.
    """

    name: str
    dtype: str
    digest: str
    active_weights: int = 0
    vocab_size: int = 0


@dataclass(frozen=True)
class Serving:
    """The time that serving over HTTP adds to the engine's.

    :param request_seconds: for each request, before its first step and after its first token.
    :param token_seconds: for each token that a step streams out.
    :param prompt_token_seconds: for each token of a prompt that a step computes: the front accepts
        prompts while the engine computes, and shares its cores.
    """

    request_seconds: float = 0.0
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    prompt_token_seconds: float = 0.0


@dataclass(frozen=True)
class HostCopies:
    """Copies of pages between the pool and the CPU buffer.

    :param bytes_per_second: of copies by themselves, in one direction at a time; 0: not measured.
    :param are_under_pass: whether the engine copies during passes there.
    :param slows: seconds lost for each second of copies during a pass: 0 if they share nothing, 1
        if nothing is gained or nothing was measured.
    """

    bytes_per_second: float = 0.0
    are_under_pass: bool = False
    slows: float = 1.0


@dataclass(frozen=True)
class HeldOut:
    """Misses of predictions for steps that the fit never saw: medians of relative misses."""

    steps: int = 0
    prefill_error: float = 0.0
    decode_error: float = 0.0
    mixed_error: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """A cost model with its origin.

    :param copy_bytes_per_second: from the host's memory to the device's.
    :param noise: median over steps of the relative spread of a step's repeats.
    :param copies: of pages, to the CPU buffer and back.
    """

    machine: MachinePrint
    software: SoftwarePrint
    model: ModelPrint
    operators: Operators
    serving: Serving
    copy_bytes_per_second: float
    held_out: HeldOut
    noise: float = 0.0
    kvell_calibration: int = SCHEMA
    copies: HostCopies = HostCopies()

    def step_seconds(self, work: Sequence[Work]) -> float:
        return self.operators.step_seconds(work)

    def served_step_seconds(self, work: Sequence[Work]) -> float:
        streamed = sum(w.num_logits > 0 for w in work)
        prompt_tokens = sum(w.count for w in work if w.count > 1)
        return (
            self.operators.step_seconds(work)
            + self.serving.step_seconds
            + streamed * self.serving.token_seconds
            + prompt_tokens * self.serving.prompt_token_seconds
        )

    @property
    def fetch(self) -> Fetch:
        return Fetch(self.operators.shape, self.copy_bytes_per_second)

    def on(self, parallel: Parallel) -> "Calibration":
        return replace(self, operators=replace(self.operators, parallel=parallel))

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


_JSON = msgspec.json.Decoder()


def decode_calibration(data: bytes, name: str, field: str = "--hardware") -> Calibration:
    """Decode the file of a calibration.

    :raises ChangeSomething: if it is not a calibration, or of another schema.
    """
    try:
        raw = decode(_JSON, data, "JSON")
    except MalformedError as error:
        raise _unusable(field, name, f"is not JSON ({error})") from error
    schema = raw.get("kvell_calibration") if isinstance(raw, dict) else None
    if schema is None:
        raise _unusable(field, name, "is not a calibration")
    if schema != SCHEMA:
        raise _unusable(field, name, f"is of schema {schema}, and this Kvell reads {SCHEMA}")
    try:
        return msgspec.convert(raw, Calibration)
    except msgspec.ValidationError as error:
        raise _unusable(field, name, f"is damaged ({error})") from error


def require_fresh(
    calibration: Calibration,
    name: str,
    model: ModelPrint,
    machine: MachinePrint | None,
    software: SoftwarePrint | None,
    field: str = "--hardware",
) -> None:
    """Raise unless a calibration is of this model, machine and code.

    :param machine: None accepts any: a replay predicts another machine.
    :param software: None accepts any.
    :raises ChangeSomething: naming all differences.
    """
    if calibration.model.digest != model.digest:
        was, wanted = (f"{each.name} in {each.dtype}" for each in (calibration.model, model))
        raise _unusable(field, name, f"is of another model: {was}, not {wanted}")
    differences = [
        *_differences(calibration.machine, machine),
        *_differences(calibration.software, software),
    ]
    if differences:
        raise _unusable(field, name, f"is stale: {'; '.join(differences)}")


def _differences(was: Any, now: Any) -> list[str]:
    if now is None:
        return []
    names = [field.name for field in fields(was)]
    pairs = [(name, getattr(was, name), getattr(now, name)) for name in names]
    return [f"{name} was {_short(a)}, is {_short(b)}" for name, a, b in pairs if a != b]


def _short(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _unusable(field: str, name: str, problem: str) -> ChangeSomething:
    remedy = "run `kvell calibrate` with the model, here and now"
    return ChangeSomething(field, name, problem, remedy)
