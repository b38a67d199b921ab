"""Checks of the project itself: what imports load, forbidden patterns, what is declared, the help of each command."""
