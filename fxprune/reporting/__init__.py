"""A plan for people: as a table, a picture, or data for a page."""
