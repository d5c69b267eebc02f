"""Which channels hang together in a recorded run, and what each says when it is dead."""
