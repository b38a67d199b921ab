"""Plugins from pip: found by entry point, loaded when asked for by name, checked, and merged over the built-in fields."""
