"""Which ranks there are: how they find the store and each other, and who has died."""
