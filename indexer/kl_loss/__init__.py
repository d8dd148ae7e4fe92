"""KL loss of the indexer against the main attention, value and gradients in one op."""
