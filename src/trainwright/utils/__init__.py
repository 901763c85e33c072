"""Small helpers of every package, without torch: text, paths, activity, charts, the heartbeat."""
