"""What inputs without labels tell: predictions of the channels that go (:mod:`.regression`), folded
into their readers (:mod:`.calibrate`), and which units to keep (:mod:`.reconstruction`)."""
