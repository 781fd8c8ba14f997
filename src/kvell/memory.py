"""The torch-free memory core as a library."""

from kvell.pages.layout import GroupSpec as GroupSpec
from kvell.pages.layout import Layout as Layout
from kvell.pages.sizing import Manager as Manager
from kvell.pages.sizing import plan_layout as plan_layout
from kvell.pages.slots import SlotTable as SlotTable
from kvell.prefix.capacity import large_pages_needed as large_pages_needed
from kvell.prefix.capacity import longest_request as longest_request
from kvell.prefix.capacity import pool_bytes_for as pool_bytes_for
from kvell.prefix.capacity import requests_that_fit as requests_that_fit
from kvell.prefix.core import MemoryCore as MemoryCore
from kvell.prefix.core import ReferenceCore
from kvell.prefix.hits import alignment_tokens as alignment_tokens
from kvell.prefix.policies import policy_of as policy_of
from kvell.prefix.radix import common_prefix as common_prefix


def create_core(layout: Layout, implementation: str = "auto") -> MemoryCore:
    """A memory core over a layout."""
    return ReferenceCore(layout)
