"""Names of Kvell's actors and placement groups in Ray; each contains its cluster and instance."""

import secrets
from dataclasses import dataclass

NAMESPACE = "kvell"
DRAWN_BYTES = 6


def drawn_group(cluster: str) -> str:
    return f"{group_beginning(cluster)}{secrets.token_hex(DRAWN_BYTES)}"


def group_beginning(cluster: str) -> str:
    """Return the beginning of the names of a cluster's placement groups.

    Ray's table of groups has no namespaces, and a cluster's name has no slash.
    """
    return f"{NAMESPACE}/{cluster}/"


@dataclass(frozen=True)
class LauncherName:
    """The name of the actor that launches an instance.

    :param group: the placement group that the actor runs in, and ``index`` its bundle there.
    """

    cluster: str
    instance_id: str
    group: str
    index: int

    def __str__(self) -> str:
        return f"{self.cluster}@{self.instance_id}@{self.group}@{self.index}"

    @staticmethod
    def of(name: str) -> "LauncherName | None":
        """Read a name; return None if it is that of another actor, like a manager."""
        words = name.split("@")
        if len(words) != 4:
            return None
        cluster, instance_id, group, index = words
        return LauncherName(cluster, instance_id, group, int(index))
