"""Reader of what users write: text to a tree with places, the tree to a model, every problem at its place."""
