"""Scores of the lightning indexer and their top-k."""
