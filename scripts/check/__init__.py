"""What the coordinate check catches: wrong rules, one at a time and joint, on every structure; what it allows right ones."""
