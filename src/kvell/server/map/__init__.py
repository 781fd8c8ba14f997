"""The memory map at ``/``: every large page of every instance, live."""
