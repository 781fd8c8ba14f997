"""Where instances of one host meet: a folder with a socket for each, and what all of them know."""

import secrets
from dataclasses import dataclass
from pathlib import Path

SECRET = "secret"
"""File in the folder that holds what all instances of the pool know."""
SECRET_BYTES = 32


@dataclass(frozen=True)
class PoolPlace:
    """Where an instance meets the others of its host.

    :param instance: its name, unique in the folder.
    :param folder: with a socket for each instance, for their owner alone.
    """

    instance: str
    folder: Path

    def secret(self) -> bytes:
        """What all instances of the pool know."""
        return (self.folder / SECRET).read_bytes()


def make_folder(folder: Path) -> None:
    """Write the secret of a new pool into an empty folder."""
    path = folder / SECRET
    path.touch(0o600)
    path.write_bytes(secrets.token_bytes(SECRET_BYTES))
