"""Planning: which model is loaded next, on which devices, and which models are evicted for it."""
