"""Targets instead of a sparsity: the parameters, multiply-accumulates or time to come to.

:mod:`fxprune.choosing.target` says what is asked for, :mod:`.counting` and :mod:`.latency` measure
widths without running a model, :mod:`.budget` finds those that come nearest.
"""
