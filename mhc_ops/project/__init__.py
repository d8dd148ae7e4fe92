"""The mixes of every token: projection of all streams and their root mean square."""
