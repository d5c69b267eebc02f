"""What fxprune knows about ops, one family a file.

Each file ends in what it registers; see :mod:`fxprune.registry`. A rule takes the algebra and a
call and returns the channels of the result.
"""
