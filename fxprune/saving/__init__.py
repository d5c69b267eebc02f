"""Pruned models and plans as files: :mod:`.saver` and :mod:`.loader` for models, :mod:`.plan_file`
for plans. A file holds tensors and a description, and no code; see docs/saving.md."""
