"""What tests of several folders build on."""
