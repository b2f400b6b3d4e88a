"""What the daemon shows and counts of itself: views, events, metrics, usage, history, traces, alerts."""
