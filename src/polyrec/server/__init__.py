"""The HTTP server: wire schema, routes, key check, metrics, logs and the process around one engine thread."""
