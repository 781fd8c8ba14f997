"""The protocol between a front and an instance, and the loop that serves it."""
