"""The memory map at ``/``: a live view of each large page of each instance."""
