"""Semantic IDs: their token layout, how they are made, the catalog and its trie. This `__init__` imports nothing."""
