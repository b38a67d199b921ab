"""Decoder models, each one file, found by the `architectures` of a Hugging Face config."""
