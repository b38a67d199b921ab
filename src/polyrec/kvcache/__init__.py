"""Where the keys and values of prompts live."""
