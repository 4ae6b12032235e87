"""Sizing on paper: what a model's cache takes on a device, how many sequences fit, and how fast it can be at best."""
