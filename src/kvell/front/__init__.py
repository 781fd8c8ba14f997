"""The front: queues requests, logs them, and gives each its output."""
