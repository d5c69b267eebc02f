"""What fxprune knows about ops, one family a file.

Each file ends in what it registers with :func:`fxprune.register`. A rule takes the algebra and a
call and returns the channels of the result.

The package can be called: ``with fxprune.patterns(mine, another):`` has these patterns hold inside
the block only.
"""

import sys
import types
from contextlib import AbstractContextManager
from typing import Any


class _Patterns(types.ModuleType):
    def __call__(self, *patterns: Any, override: bool = False) -> AbstractContextManager[None]:
        """See :func:`fxprune.rules.registry.scope`."""
        from fxprune.rules.registry import scope

        return scope(*patterns, override=override)


sys.modules[__name__].__class__ = _Patterns
