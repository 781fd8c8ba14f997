"""Two families of errors: *change something* and *try later*.

A caller that gets :class:`ChangeSomething` must change a named field; trying
again unchanged cannot help.  A caller that gets :class:`TryLater` did nothing
wrong and may come back.
"""


class KvellError(Exception):
    """Whatever Kvell raises on purpose; its text is one clear line."""


class ChangeSomething(KvellError):  # noqa: N818 - the name says what to do
    """Something the user gave cannot work.

    :param field: the flag, parameter or file that is wrong, as the user wrote it.
    :param value: what it was.
    :param problem: what is wrong with it, without the field's name.
    :param remedy: what to change, with a value that works where one is known.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}={value}: {problem}; {remedy}")


class TryLater(KvellError):  # noqa: N818
    """Nothing is wrong with the request; there is no room or no peer just now."""


class InstanceDied(TryLater):
    """The process that served a request ended before the request did."""
