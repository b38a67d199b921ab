"""What ships for tests of Polyrec and of what plugs into it."""
