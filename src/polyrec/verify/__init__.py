"""What `polyrec verify` measures of a model folder: rows of a table, each with its limits and whether they are kept."""
