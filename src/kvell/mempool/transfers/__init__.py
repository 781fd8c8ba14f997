"""Transfers of texts between instances: the sender offers pages, the receiver pulls them."""
