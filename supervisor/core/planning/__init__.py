"""Planning: what is loaded next, where, and who has to go for it."""
