"""Engines that kvant plugs into."""
