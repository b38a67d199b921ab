"""The built-in platforms, one folder each; none is imported until it is chosen."""
