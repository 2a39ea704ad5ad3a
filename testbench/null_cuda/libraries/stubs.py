"""Writes functions for what libtorch imports of a library and its stand-in does not define. They say once that they
were called, and return an error.

    python stubs.py PREFIX ERROR OUT OBJECT... -- IMPORTER...

PREFIX is a pattern for how the names of the library's functions begin, before a capital letter; ERROR is the status
that they return, OBJECT what the stand-in was compiled to. The names come from the imports of the libraries IMPORTER,
and, for those that are looked up at run time, from the texts of libc10_cuda.
"""

import re
import subprocess
import sys
from pathlib import Path

STUB = """extern "C" __attribute__((visibility("default"))) int {name}() {{
  static const int said = fprintf(stderr, "null CUDA has no {name}\\n");
  (void)said;
  return {error};
}}
"""


def symbols(options, files):
    printed = subprocess.run(["nm", *options, *files], capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in printed.splitlines() if not line.endswith(":"))
    return {words[-1].split("@")[0] for words in lines if words}


def looked_up(library):
    """The driver's functions are looked up by their names."""
    return {name.decode() for name in re.findall(rb"\0(cu[A-Z][a-z]\w{4,})(?=\0)", Path(library).read_bytes())}


def main(prefix, error, out, *files):
    separator = files.index("--")
    objects, importers = files[:separator], files[separator + 1 :]
    wanted = symbols(["-D", "--undefined-only"], importers)
    wanted |= looked_up(next(path for path in importers if path.endswith("libc10_cuda.so")))
    defined = symbols(["--defined-only"], objects)
    names = sorted(name for name in wanted - defined if re.match(rf"{prefix}[A-Z]\w*$", name))
    stubs = [STUB.format(name=name, error=error) for name in names]
    Path(out).write_text("#include <cstdio>\n" + "".join(stubs))


if __name__ == "__main__":
    main(*sys.argv[1:])
