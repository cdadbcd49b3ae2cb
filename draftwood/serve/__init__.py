"""The OpenAI-compatible server: continuous batching behind HTTP."""
