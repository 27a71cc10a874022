"""Token tables: the row of the token itself."""
