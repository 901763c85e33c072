"""Have every Python process of a recorded command say at once what it does, however short that is."""

from __future__ import annotations

from trainwright.utils import activity

activity.QUIET_SECONDS = 0.0
