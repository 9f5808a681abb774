"""From the description of a job to its run: schema, compiler, queue, execution."""
