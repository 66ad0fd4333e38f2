"""Kits for authors of links, engines, reducers and exporters; only tests import them."""
