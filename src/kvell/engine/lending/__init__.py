"""Sections of requests whose pages lie at other instances: a debtor's side of the loans."""
