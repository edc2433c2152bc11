"""`mxep explain`: what a configuration needs and does, without running it."""
