"""The number of files and sockets that this process may have open."""

import resource


def allow_open_files(wanted: int | None = None) -> int:
    """Raise the soft limit of open files to ``wanted``, as far as the hard limit allows.

    The limit is never lowered. Child processes inherit it, so it is raised no further: programs
    that close every descriptor up to the limit take long if it is a billion.

    :param wanted: None takes as many as the hard limit allows.
    :returns: how many may be open now; ``wanted`` if there is no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted is None or (hard != resource.RLIM_INFINITY and wanted > hard):
        wanted = hard
    if soft == resource.RLIM_INFINITY or soft >= wanted >= 0:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
