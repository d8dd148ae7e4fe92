"""Everything before a sublayer: project, gates, collapse."""
