"""What may change in the cached coordinates without changing the model."""
