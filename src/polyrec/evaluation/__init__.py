"""How good a ranking is: metrics, the baselines every model stands beside, and the run that compares them."""
