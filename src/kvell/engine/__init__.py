"""Requests, the step plan, running a plan, sampling, the loop, the instance protocol."""
