"""The memory core: the Python reference and the compiled one."""
