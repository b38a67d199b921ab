"""The command line: one file per command. This `__init__` imports nothing."""
