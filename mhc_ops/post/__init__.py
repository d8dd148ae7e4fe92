"""After a sublayer: expand its output and mix the streams."""
