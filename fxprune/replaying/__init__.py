"""The recorded run at its new widths: what fits, what does not, and whose fault that is."""
