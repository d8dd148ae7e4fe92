"""Exit of the network: weighted sum of the streams."""
