"""The round on the device: static shapes, buffers written in place, two short reports to the host."""
