"""The class of a distributed optimizer, and what its step does around the reduction."""
