"""What is said of a model that cannot be had."""

from kvell.errors import ChangeSomething
from kvell.models.sources.packaged import MODEL_NAME


def no_model(model: str, problem: str) -> ChangeSomething:
    """Names the model and what there is instead."""
    remedy = f"use {MODEL_NAME}, a transformers directory, or a hub id"
    return ChangeSomething("model", model, problem, remedy)
