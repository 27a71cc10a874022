"""What runs keep: their directories, the files in them, and how these are written so that none is ever half there."""
