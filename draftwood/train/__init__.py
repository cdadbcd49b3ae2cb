"""Training drafters: texts of the target, the trainer, and the measurement of what came out."""
