"""Columns of the arrays in which pages are passed: each row is one page or copy, in int32."""


class NewPageRow:
    """Columns of new pages and of a holder's pages.

    :cvar HANDLE: an index into the call's handles, where it has several.
    """

    HANDLE, GROUP, POSITION, PAGE = range(4)


class PageRow:
    """Columns of pages without owners."""

    GROUP, PAGE = range(2)


class PulledPageRow:
    """Columns of pages that are copied from another instance."""

    GROUP, SOURCE, TARGET = range(3)


class PageCountRow:
    """Columns of the pages of each group.

    :cvar FIRST: their first position.
    """

    FIRST, COUNT = range(2)


class SourceRow:
    """Columns of indexed pages of a text.

    :cvar END: tokens of the prefix that the page ends.
    """

    GROUP, POSITION, PAGE, END = range(4)


class CheckpointRow:
    """Columns of checkpoints of states.

    :cvar HANDLE: an index into the call's handles.
    :cvar END: tokens of the prefix that the state represents.
    """

    HANDLE, GROUP, END, SLICE, PAGE = range(5)


class LargePageRow:
    """Columns of large pages.

    :cvar GROUP: ``NO_GROUP`` of an empty page, ``WITHHELD_GROUP`` of a withheld one.
    :cvar STEP: if small pages are cached and none is used, the last access of the one evicted
        last; else ``NO_STEP``.
    """

    GROUP, USED, CACHED, STEP = range(4)


class SmallPageRow:
    """Columns of the small pages of a large one.

    :cvar END: tokens of the prefix that it ends; ``NO_END`` for a page that is not in the index.
    :cvar STEP: its last access; ``NO_STEP`` for a page that is not in the index.
    """

    PAGE, USERS, END, STEP = range(4)


class IndexChangeRow:
    """Columns of changes of the index.

    :cvar END: tokens of the prefix that the page ends.
    :cvar NUMBER: the holder's handle (``NAMED``) or the page's new number (``MOVED``).
    """

    CHANGE, GROUP, PAGE, END, NUMBER = range(5)


class OffloadRow:
    """Columns of pages to copy to the CPU buffer.

    :cvar HELD: the buffer's page.
    """

    GROUP, PAGE, HELD = range(3)


class FetchRow:
    """Columns of pages to copy back from the CPU buffer.

    :cvar HELD: the buffer's page.
    """

    GROUP, HELD, PAGE = range(3)
