"""What goes wrong in a campaign: disks, buckets and files that fail or are broken."""
