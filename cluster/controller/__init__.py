"""The controller's decisions: pure functions of the image, and the sessions of brokers."""
