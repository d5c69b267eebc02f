"""What a model holds, and how it is read, copied and run."""
