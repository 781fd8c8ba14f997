"""Connections of the HTTP face, bounded in number, time and memory."""
