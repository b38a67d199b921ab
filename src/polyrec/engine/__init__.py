"""From requests to ranked items: scheduling, batching, the search, and the recommender around them."""
