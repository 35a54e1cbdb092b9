"""Run on a Ray cluster. Importing this turns on Ray's token authentication, unless RAY_AUTH_MODE
says otherwise.
"""

import os

AUTHENTICATION = os.environ.get("RAY_AUTH_MODE", "")
"""RAY_AUTH_MODE as inherited from Ray's own processes: "token" on a cluster with tokens."""
os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
