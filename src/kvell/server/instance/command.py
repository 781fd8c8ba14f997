"""The command line of an instance process."""

import sys

from kvell.engine.setup.engine_settings import EngineSettings

INHERITED = (
    *("--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}"),
    *("--processors", "{processors}", "--threads", "{threads}"),
    *("--memory-parts", "{memory_parts}", "--weights-fd", "{weights_fd}"),
    *("--instance-id", "{instance_id}", "--role", "{role}"),
    *("--pool-dir", "{pool_dir}", "--pd-caching", "{pd_caching}"),
    *("--page-transport", "{page_transport}"),
)
"""Arguments that the front fills in at each start of an instance."""


def instance_command(settings: EngineSettings, *, debug: bool = False) -> list[str]:
    """Return an instance's command line; the front fills in what is in braces."""
    command = [sys.executable, "-m", "kvell.cli.main", "instance", *settings.flags()]
    return [*command, *(["--debug"] if debug else []), *INHERITED]
