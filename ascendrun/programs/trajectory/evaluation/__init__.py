"""Class probabilities, scores, calibration and plots."""
