"""With this directory on ``PYTHONPATH``, ``kept serve`` has the probe of ``probe.py`` inside."""

import os
import sys

if sys.orig_argv[1:4] == ["-m", "kept", "serve"]:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import probe

    probe.install(os.environ["PROBE_DIR"])
