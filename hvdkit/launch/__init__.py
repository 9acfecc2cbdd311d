"""``hvdkitrun``: start the ranks of a job, carry their output, and leave none behind when one fails."""
