"""Which tree to grow and how much of it to verify: one file per rule, all behind `base.Policy`."""
