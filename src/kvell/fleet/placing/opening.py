"""From ``--cluster`` to a cluster's manager, which Ray places if there is none."""

import importlib.util

from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.followed.followed_members import Find, ManagerAddress
from kvell.fleet.manager.settings import ClusterSettings
from kvell.fleet.placing.meeting import meet

REMEDY = 'pip install "kvell[ray]"'


def check_ray(cluster: str) -> None:
    """Check that Ray is installed, without importing it.

    :raises ChangeSomething: if it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ChangeSomething("--cluster", cluster, "needs Ray, which is not installed", REMEDY)


def manager_finder(cluster: str, settings: ClusterSettings) -> Find:
    """Return a function that finds the manager of a cluster on the machines of Ray.

    At its first call the function raises ChangeSomething when no Ray answers; later it raises
    TryLater, since Ray was there before.

    :param cluster: Ray's address: ``host:port``, ``ray://host:port`` or ``auto``.
    :param settings: of the cluster, if there is none of this name.
    :raises ChangeSomething: when Ray is not installed.
    """
    check_ray(cluster)
    was_there = False

    async def find() -> ManagerAddress:
        nonlocal was_there
        try:
            address, secret = await meet(cluster, settings)
        except ChangeSomething as error:
            if was_there:
                raise TryLater(str(error)) from error
            raise
        was_there = True
        return ManagerAddress(address, secret, settings.fingerprint, settings.name)

    return find
