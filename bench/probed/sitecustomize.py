"""With this directory on ``PYTHONPATH``, ``kept serve`` has the probe of ``probe.py`` inside."""

import os
import sys

if sys.orig_argv[1:5] == ["-P", "-m", "kept", "serve"]:  # as kept.testing starts it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import probe

    probe.install(os.environ["PROBE_DIR"])
