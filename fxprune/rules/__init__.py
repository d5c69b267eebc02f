"""What patterns speak of and in: ops, specs, sizes, channels, layouts; and where they are found."""
