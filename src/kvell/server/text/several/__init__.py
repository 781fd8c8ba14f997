"""Requests of one client that go together: side by side, and beam by beam."""
