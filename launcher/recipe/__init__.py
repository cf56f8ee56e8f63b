"""What the user wrote: schema, loading, and every mistake with its place."""
