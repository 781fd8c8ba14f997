"""Attention over paged memory: kernels by device, mergeable partials."""
