"""How gRPC is set up here: imported before ``grpc`` by everything that uses it.

grpc reads the environment when it is loaded: without fork support (workers are exec'ed, and it
would warn), and without lines of its own on stderr, since we say ourselves what went wrong.
"""

from __future__ import annotations

import os
from typing import Final

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

HANDSHAKE_MS: Final = 5_000
"""A connection that speaks no HTTP/2 for so long is closed."""
