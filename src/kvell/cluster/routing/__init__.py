"""Routing: policies that choose the instance of a request from views of all instances."""
