"""`polyrec bench`: synthetic models, workloads, and what is measured with them. Above the engine, beside the server."""
