"""Plug-ins for other packages, one module each; imported only on request."""
