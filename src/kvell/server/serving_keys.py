"""The keys of a server, and their reload."""

import logging

from kvell.clock import Clock, MonotonicClock
from kvell.errors import ChangeSomething
from kvell.server.access.accounts import ApiKey
from kvell.server.access.key_file import is_readable_by_others, read_keys
from kvell.server.access.keys import KeyRing, operator_key
from kvell.server.access.shared_use import SharedUse
from kvell.server.api.serve_options import ServeOptions
from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)


class ServingKeys:
    """The ring of a server's keys, which :meth:`reload` replaces by the current file's.

    :raises ChangeSomething: when a key is invalid, with the entry and field of the file.
    """

    def __init__(self, options: ServeOptions, clock: Clock | None = None) -> None:
        self._single, self._file = options.api_key, options.api_key_file
        self._max_in_flight = options.max_in_flight_per_key
        self._clock = clock or MonotonicClock()
        self.ring = KeyRing(self._read(), self._clock.now_seconds())

    def reload(self) -> None:
        """Read the file again; an invalid file is logged and changes nothing.

        Unchanged keys keep their accounts.
        """
        try:
            keys = self._read()
        except ChangeSomething as error:
            tell(logger, logging.ERROR, "keys_not_read", problem=str(error))
            return
        self.ring.replace(keys, self._clock.now_seconds())
        tell(logger, logging.INFO, "keys_read", keys=len(keys))

    def shared_use(self) -> SharedUse:
        return SharedUse(self.ring, self._clock)

    def _read(self) -> tuple[ApiKey, ...]:
        single = () if self._single is None else (_single_key(self._single),)
        if self._file is None:
            return single
        keys = read_keys(self._file, self._max_in_flight)
        if single and any(key.digest == single[0].digest for key in keys):
            problem = "is in the key file too"
            raise ChangeSomething("api_key", "…", problem, "give it once, with operator = true")
        if is_readable_by_others(self._file):
            remedy = f"chmod 600 {self._file}"
            tell(logger, logging.WARNING, "key_file_readable_by_others", remedy=remedy)
        return single + keys


def _single_key(key: str) -> ApiKey:
    if not key.strip():
        raise ChangeSomething("api_key", "''", "is empty", "give a key, or leave it out")
    return operator_key(key)
