"""How messages and pages get from one process to another."""
