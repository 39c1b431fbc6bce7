"""How stale each layer's gradient is where parameters are read and written layer by layer, and what that does."""
