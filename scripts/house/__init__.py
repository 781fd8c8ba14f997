"""Figures of how source and tests are built: ``python -m scripts.house``.

``tests/test_house`` has a budget for each.  A figure may fall, and rises only in a commit that
changes its budget.
"""

from scripts.house.source import SOURCE, TESTS, Module, modules

__all__ = ["SOURCE", "TESTS", "Module", "modules"]
