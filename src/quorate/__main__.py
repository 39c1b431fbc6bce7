"""`python -m quorate` is `quorate`."""

from __future__ import annotations

import sys

from quorate.cli import main

sys.exit(main())
