"""The demo: a small model that is trained here, or one of yours, stored in every way."""
