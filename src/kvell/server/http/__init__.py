"""Connections of the HTTP server, bounded in number, time and memory."""
