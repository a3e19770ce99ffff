"""What a study measured, estimated from its finished trials."""
