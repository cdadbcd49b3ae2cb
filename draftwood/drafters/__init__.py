"""Drafters: what proposes the next tokens of a request."""
