"""`draftwood bench gpu`: what a round takes of a device, in the shapes of public models, with random weights."""
