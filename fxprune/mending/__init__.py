"""Code and attributes of the model that hold sizes, made right."""
