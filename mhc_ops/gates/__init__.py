"""The three coefficients of a site from its mixes."""
