"""Data sets that ship with the project: a file each, the cleaning code beside it."""
