"""Ways to compute attention, each a set of plans that fulfil `hardware.base.attention.AttentionPlan`."""
