"""What every layer may use: errors, settings, atomic files, the lazy registry, request types. Imports no torch."""
