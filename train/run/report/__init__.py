"""What a run says of itself: metrics, progress, timing, pictures."""
