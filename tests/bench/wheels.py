"""Names of wheels that a GPU machine needs."""

from importlib.metadata import requires

from bench.gpu.wheels import (
    base_requirements,
    expected_packages,
    missing_packages,
)


def carried() -> list[str]:
    """The packages whose wheels are fetched, by what is installed here."""
    return missing_packages(
        base_requirements(), expected_packages(), lambda name: requires(name) or []
    )
