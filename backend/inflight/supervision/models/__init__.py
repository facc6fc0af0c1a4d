"""Model control: loads, replaces and unloads models of a running server."""
