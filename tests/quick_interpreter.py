"""Triton's interpreter without work that it does again and again: a third of the time of the tests that run in it.

Before a kernel and before every device function that it calls, the interpreter looks through all of triton.language for the functions that
it has to replace (`_patch_lang`). Within one launch they are replaced after the first time, and looking again finds none.
"""

from functools import cache
from types import FunctionType


def install() -> None:
    """Of Triton 3.6; where the interpreter is another, nothing is changed."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, modules = interpreter._patch_lang, (language, language.core)
    replaced: set[str] = set()  # of these modules, by the launch that is under way

    @cache
    def named(function: FunctionType) -> frozenset[str]:
        """What `function` knows of them, as `patch` finds it out"""
        return frozenset(module.__name__ for module in modules if any(value is module for value in function.__globals__.values()))

    def patch_once(function: FunctionType) -> interpreter._LangPatchScope:
        wanted = named(function)
        if wanted and wanted <= replaced:
            return interpreter._LangPatchScope()  # nothing to put back
        scope = patch(function)
        replaced.update(wanted)
        restore = scope.restore  # which is called for the kernel's scope alone, at the end of a launch

        def end() -> None:
            replaced.clear()
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_once
