"""The command line: arguments, environment and printing, and nothing that decides."""
