"""The simulator: cohort packing, local training, the round loop, checkpoints."""
