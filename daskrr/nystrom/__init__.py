"""Which columns are sampled, and what they are fitted to."""
