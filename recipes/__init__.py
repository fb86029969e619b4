"""One file per architecture; each defines `recipe`."""
