"""`draftwood bench gpu`: how long a round takes on a device, in the shapes of public models, with random weights."""
