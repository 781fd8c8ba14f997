"""Errors of a request that is answered as another one name the fields that were sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvell.errors import ChangeSomething
from kvell.server.text.text_stream import RequestRefused


@contextmanager
def fields_renamed(name_here: Callable[[str], str]) -> Iterator[None]:
    """Raise the errors of what is done inside under the names of the request that came.

    :param name_here: what the request calls a field of the one that it is answered as.
    :raises ChangeSomething: with the field's name as it was sent.
    :raises RequestRefused: likewise.
    """
    try:
        yield
    except ChangeSomething as error:
        field = name_here(error.field)
        said = (field, error.value, error.problem, error.remedy)
        raise type(error)(*said, bound=error.bound) from error
    except RequestRefused as error:
        field = name_here(error.field)
        told = str(error)
        if error.field and told.startswith(error.field):
            told = field + told.removeprefix(error.field)
        raise RequestRefused(told, field, error.bound) from error
