"""The end of an engine in this process, by the name of vLLM's module."""

import gc

from kvell.device.available import give_back_freed


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free engines that nothing refers to, and give their memory back to the system.

    :param shutdown_ray: without effect: an engine in this process starts no cluster.
    """
    gc.collect()
    give_back_freed()
