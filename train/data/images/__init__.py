"""From pictures to batches: decoding, augmentation and order."""
