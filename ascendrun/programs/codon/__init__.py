"""Codon optimisation: a BigBird that predicts the codons of a protein, by organism."""
