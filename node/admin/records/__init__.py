"""Records of any partition, for operators: browsed, searched, followed."""
