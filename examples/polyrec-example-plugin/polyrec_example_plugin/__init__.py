"""An example of plugins for Polyrec: one operation and one attention backend. Importing this loads neither."""
