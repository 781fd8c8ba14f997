"""The error for a model that cannot be found."""

from kvell.errors import ChangeSomething
from kvell.models.sources.packaged import MODEL_NAME


def no_model(model: str, problem: str) -> ChangeSomething:
    """Make the error, which names the model and the alternatives."""
    remedy = f"use {MODEL_NAME}, a transformers directory, or a hub id"
    return ChangeSomething("model", model, problem, remedy)
