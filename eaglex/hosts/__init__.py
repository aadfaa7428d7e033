"""Servers that eaglex plugs into, one folder each. Importing this package imports none of them."""
