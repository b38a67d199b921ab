"""The contracts that a platform fulfils: backend = runtime + graph + ops; and the protocol of attention backends."""
