"""Loans of memory between instances: whole sections of a request's pages, read in place."""
