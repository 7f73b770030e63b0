"""The screens of `ascendrun top`."""
