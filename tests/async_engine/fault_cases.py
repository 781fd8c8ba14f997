"""Faults of two instances: acts, shapes and refusals."""

from kvell.engine.lending.placement import NOBODY_LENDS
from tests.async_engine.faults import REFUSALS

SHAPES = ("prefill=1,decode=2", "mixed=3")

ACTS = ("deflate", "draft", "borrow", "moved")


"""What must have happened in a run, besides faults."""

LENDING_REFUSALS = (*REFUSALS, NOBODY_LENDS, "the instances can hold together")


"""Why an accepted request may get no answer: deaths, or too little memory is left."""
