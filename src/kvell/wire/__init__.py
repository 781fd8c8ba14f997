"""Connections between processes: authentication, frames, and sockets with bounded buffers."""
