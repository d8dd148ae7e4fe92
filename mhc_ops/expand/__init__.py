"""Entry of the network: copies of the embedding."""
