"""What PyTorch does otherwise than this crate, so that the pages that say so stay true."""

import contextlib
import inspect


@contextlib.contextmanager
def refused(error, text="", what=""):
    """Asserts that PyTorch refuses what is done here, with this kind of error and this text in its message."""
    try:
        yield
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__} {what}")


def run_all(script):
    """Calls each function of a script that takes no arguments: a row of a table, which fails if PyTorch differs."""
    rows = [f for f in script.values() if inspect.isfunction(f) and not inspect.signature(f).parameters]
    assert rows, "there are no rows"
    for row in rows:
        row()
    print("as the table says")
