"""The models of a replay: the target model and its draft model."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.plan.configs import load_config
from kvell.cli.terminal.options import (
    DEFAULT_MODEL,
    Command,
    config_option,
    gathering,
    setting_option,
)
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.sizes import FiniteRange
from kvell.engine.setup.engine_settings import USUAL_DRAFT_TOKENS
from kvell.memory import LayerSpec, as_draft
from kvell.models.config.kv_dtypes import ELEMENT_BYTES

if TYPE_CHECKING:
    from kvell.engine.requests.limits import Limits


@dataclass(frozen=True)
class DraftTokens:
    """The flags of speculative decoding in a replay.

    :param acceptance: chance that a draft token is accepted if the previous ones were, 0 to 1.
    """

    num_speculative_tokens: int = 0
    speculative_model: str | None = None
    acceptance: float = 0.0

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
    """The flags that choose the models of a replay.

    :param hf_overrides: JSON object of fields that replace those of the model's config, and not
        those of the draft model.
    """

    model: str
    dtype: str
    hf_overrides: str | None
    draft_tokens: DraftTokens

    @property
    def number_bytes(self) -> int:
        """The bytes of one stored number."""
        return ELEMENT_BYTES[self.dtype]

    def describe(self, session: Session) -> "ReplayModels":
        """Read both models from their configs.

        :raises ChangeSomething: if a config cannot be found or described.
        """
        draft = self.draft_tokens.speculative_model
        return read_models(self.model, draft, self.number_bytes, session, self.hf_overrides)


def model_options(command: Command) -> Command:
    """Add the flags; the command gets them as ``chosen``."""

    options = (
        click.argument("named", required=False, metavar="[MODEL]"),
        click.option(
            "--model",
            help="A name in bench/configs, a config.json, a transformers directory, or a hub id."
            f"  [default: {DEFAULT_MODEL}]",
        ),
        config_option,
        setting_option("dtype"),
        setting_option("hf_overrides"),
        click.option(
            "--num-speculative-tokens",
            type=click.IntRange(min=0),
            metavar="N",
            default=0,
            show_default=True,
            help="Draft tokens per step and request.",
        ),
        click.option(
            "--speculative-model",
            metavar="MODEL",
            help="The draft model, named like --model. [default: draft tokens cost nothing]",
        ),
        click.option(
            "--acceptance",
            type=FiniteRange(0, 1),
            metavar="R",
            default=0.7,
            show_default=True,
            help="Chance that a draft token is accepted if those before it were.",
        ),
    )
    return gathering(command, "chosen", _model_flags, options)


def _model_flags(
    named: str | None,
    model: str | None,
    dtype: str,
    hf_overrides: str | None,
    num_speculative_tokens: int,
    speculative_model: str | None,
    acceptance: float,
) -> ModelFlags:
    if speculative_model is not None:
        num_speculative_tokens = num_speculative_tokens or USUAL_DRAFT_TOKENS
    draft_tokens = DraftTokens(num_speculative_tokens, speculative_model, acceptance)
    return ModelFlags(named or model or DEFAULT_MODEL, dtype, hf_overrides, draft_tokens)


@dataclass(frozen=True)
class ReplayModels:
    """The layers that store KV, and the costs of a step.

    :param layers: layers of both models.
    :param cost: cost of the target model.
    :param draft_cost: cost of the draft model, if there is one.
    :param draft_tokens_end: the draft model's context if shorter than ``max_model_len``; else 0.
    """

    layers: tuple[LayerSpec, ...]
    max_model_len: int
    cost: Any
    draft_cost: Any = None
    description: Any = None
    draft_tokens_end: int = 0


def read_models(
    model: str,
    speculative_model: str | None,
    element_bytes: int,
    session: Session,
    hf_overrides: str | None = None,
) -> ReplayModels:
    """Read both models from their configs.

    :param hf_overrides: JSON object of fields that replace those of the target model's config.
    :raises ChangeSomething: if a config cannot be found or described.
    """
    from kvell.engine.requests.limits import draft_tokens_end
    from kvell.models.config.description import describe
    from kvell.simulator.hardware.model_cost import model_cost

    config = load_config(model, session, hf_overrides)
    description = describe(config, element_bytes)
    cost = model_cost(config, description, element_bytes)
    if speculative_model is None:
        return ReplayModels(
            description.layers, description.max_model_len, cost, description=description
        )
    draft_config = load_config(speculative_model, session)
    draft = describe(draft_config, element_bytes)
    return ReplayModels(
        (*description.layers, *as_draft(draft.layers)),
        description.max_model_len,
        cost,
        model_cost(draft_config, draft, element_bytes),
        description,
        draft_tokens_end(description.max_model_len, draft.max_model_len),
    )
