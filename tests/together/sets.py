from itertools import combinations

from tests.together.mechanisms import (
    SIGNS,
)

ENGINE = tuple(SIGNS)

SETS = (
    *((name,) for name in ENGINE),
    *combinations(ENGINE, 2),
    ("memory", "buffer", "offload", "draft", "async", "two models"),
    ("memory", "buffer", "offload", "draft", "two models", "images", "hybrid", "int8"),
)
