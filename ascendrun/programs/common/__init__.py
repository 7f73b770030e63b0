"""What every bundled program needs: its options, its process group, its checkpoints."""
