"""A run on a Ray cluster. Importing this turns Ray's token authentication on, unless RAY_AUTH_MODE
says otherwise.
"""

import os

AUTHENTICATION = os.environ.get("RAY_AUTH_MODE", "")
"""What Ray's own processes gave this one: "token" on a cluster that asks for one."""
os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
