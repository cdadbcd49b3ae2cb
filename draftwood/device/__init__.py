"""The round on the device: static shapes, buffers written in place, one read by the host."""
