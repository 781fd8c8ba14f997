"""Connections between processes: who may come in, frames, and sockets that keep to bounds."""
