"""The rotation of tiles, and the kernel that rotates keys once before attention."""
