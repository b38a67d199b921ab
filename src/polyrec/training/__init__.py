"""Training a recommender: recipe, objective, trainer, checkpoints."""
