"""Hidden states of the target: extraction and the feature store."""
