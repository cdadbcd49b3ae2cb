"""`draftwood batch`: a file of prompts in, a file of answers out, and a run that may be killed at any moment."""
