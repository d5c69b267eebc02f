"""What files and pruned models hold of how they were made, as plain data."""
