"""Do what every train script needs around its loop and no lesson teaches."""
