"""Events and items in, histories, splits and prompts out. This package's `__init__` imports nothing."""
