"""The trajectory program: how well it learns real ships, and how fast it trains."""
