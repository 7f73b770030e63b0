"""How fast the devices of a few nodes compute and exchange: what `doctor --deep` runs."""
