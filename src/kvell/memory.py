"""The torch-free memory core as a library."""

from kvell.prefix.core import MemoryCore as MemoryCore
from kvell.prefix.core import ReferenceCore
from kvell.prefix.hits import alignment_tokens as alignment_tokens
from kvell.prefix.policies import policy_of as policy_of
from kvell.prefix.radix import common_prefix as common_prefix
from kvell.pages.layout import Layout as Layout


def create_core(layout: Layout, implementation: str = "auto") -> MemoryCore:
    """A memory core over a layout."""
    return ReferenceCore(layout)
