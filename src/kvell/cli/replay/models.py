"""The models of a replay: the target model and its draft model."""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.plan.configs import load_config
from kvell.cli.terminal.options import DEFAULT_MODEL, Command
from kvell.cli.terminal.session import Session
from kvell.engine.setup.engine_settings import USUAL_DRAFT_TOKENS, EngineSettings
from kvell.errors import ChangeSomething
from kvell.flags import setting, setting_of
from kvell.memory import LayerSpec, as_draft
from kvell.models.config.kv_dtypes import ELEMENT_BYTES
from kvell.wire.decoding import read_bounded

if TYPE_CHECKING:
    from kvell.engine.requests.limits import Limits
    from kvell.simulator.replay.runner import StepTimer


@dataclass(frozen=True)
class DraftTokens:
    """The flags of speculative decoding in a replay."""

    num_speculative_tokens: int = setting(
        0, "--num-speculative-tokens", "Draft tokens per step and request.", "integer", least=0
    )
    speculative_model: str | None = setting(
        None,
        "--speculative-model",
        "The draft model, named like --model. [default: draft tokens cost nothing]",
        metavar="MODEL",
    )
    acceptance: float = setting(
        0.7,
        "--acceptance",
        "Chance that a draft token is accepted if those before it were.",
        "number",
        metavar="R",
        least=0,
        most=1,
    )

    def __post_init__(self) -> None:
        if self.speculative_model is not None and not self.num_speculative_tokens:
            object.__setattr__(self, "num_speculative_tokens", USUAL_DRAFT_TOKENS)

    def within(self, limits: "Limits", models: "ReplayModels") -> "Limits":
        """Return ``limits`` with this number of draft tokens, up to the draft model's context."""
        return replace(
            limits,
            num_speculative_tokens=self.num_speculative_tokens,
            has_drafter=True,
            draft_tokens_end=models.draft_tokens_end,
        )


@dataclass(frozen=True)
class ModelFlags:
    """The flags that choose the models of a replay."""

    model: str = setting(
        DEFAULT_MODEL,
        "--model",
        "A name of `kvell plan --models`, a config.json, a transformers directory, a GGUF file, "
        "or a hub id."
        f"  [default: {DEFAULT_MODEL}]",
        typed=None,
    )
    dtype: str = setting_of(EngineSettings, "dtype")
    hf_overrides: str | None = setting_of(EngineSettings, "hf_overrides")
    draft_tokens: DraftTokens = field(default_factory=DraftTokens)

    @property
    def number_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def describe(self, session: Session) -> "ReplayModels":
        """Read both models from their configs.

        :raises ChangeSomething: if a config cannot be found or described.
        """
        from kvell.engine.requests.limits import draft_tokens_end
        from kvell.models.config.description import describe
        from kvell.simulator.hardware.model_cost import model_cost

        config, _ = load_config(self.model, session, self.hf_overrides)
        description = describe(config, self.number_bytes)
        cost = model_cost(config, description, self.number_bytes)
        draft_model = self.draft_tokens.speculative_model
        if draft_model is None:
            return ReplayModels(
                description.layers, description.max_model_len, cost, description=description
            )
        draft_config, _ = load_config(draft_model, session)
        draft = describe(draft_config, self.number_bytes)
        return ReplayModels(
            (*description.layers, *as_draft(draft.layers)),
            description.max_model_len,
            cost,
            model_cost(draft_config, draft, self.number_bytes),
            description,
            draft_tokens_end(description.max_model_len, draft.max_model_len),
        )


def model_argument(command: Command) -> Command:
    """Add an argument for the model, which replaces the value of ``--model``."""

    @functools.wraps(command)
    def run_with_model(
        *args: object, named: str | None, model: str | None, **given: object
    ) -> object:
        return command(*args, model=named or model, **given)

    return click.argument("named", required=False, metavar="[MODEL]")(run_with_model)


@dataclass(frozen=True)
class ReplayModels:
    """The layers that store KV, and the costs of a step.

    :param draft_tokens_end: the draft model's context if shorter than ``max_model_len``; else 0.
    """

    layers: tuple[LayerSpec, ...]
    max_model_len: int
    cost: Any
    draft_cost: Any = None
    description: Any = None
    draft_tokens_end: int = 0


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
