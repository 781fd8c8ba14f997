"""Fakes that need no model: for tests, demos, and load tests of the front."""
