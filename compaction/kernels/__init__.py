"""The compiled kernels of compaction: offset maps, rule maps and the scans that fill them."""
